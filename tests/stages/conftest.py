"""Fixtures of the parts that stages are made of."""

from tests.draft.conftest import inputs, on_the_cpu
from tests.hidden_states.conftest import make, model, records, samples, target

__all__ = ["inputs", "make", "model", "on_the_cpu", "records", "samples", "target"]
