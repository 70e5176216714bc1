"""Artifacts: what makes each one (stages, fingerprints), where it lies (store, manifests), who makes it (jobs)."""
