"""The command line: one command per stage, and tools to look at what the stages made.

Commands only parse: the work is in the stage's module, the caching in the store.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from eagle3 import console
from eagle3.artifacts.job import Job
from eagle3.cli.tools import app as tools
from eagle3.errors import Eagle3Error

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""Turn prompts and a target model into a verified EAGLE-3 draft model.

    Usually `snakemake --cores N` calls these commands. Each one can also be run by hand:

        eagle3 --configfile config/config.yaml samples --target results/demo/target/target.json
        --output results/demo/samples/part-0/manifest.json results/demo/responses/part-0/shard-*

    Exit codes: 0 done, 1 an error in the input, settings or artifacts (the message says what to do), 2 wrong
    usage, 70 a bug in this program.""",
)
app.add_typer(tools)

STAGES = "Stages, in order"
TargetFile = Annotated[Path, typer.Option(help="target.json of the pinned target.")]
Output = Annotated[Path, typer.Option(help="Manifest to write; the artifact's files go into its folder.")]
Shards = Annotated[list[Path], typer.Argument(help="Hidden-state shards.")]
Evaluation = Annotated[Path, typer.Option(help="Held-out samples (dataset/eval.jsonl.zst).")]


@app.callback()
def common(
    context: typer.Context,
    configfile: Annotated[
        list[Path] | None, typer.Option(help="Configuration file; repeat to override section by section.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="The stage's settings as JSON, as Snakemake gives them, instead of --configfile."),
    ] = None,
    machine: Annotated[str | None, typer.Option(help="Machine settings as JSON; never part of a key.")] = None,
    results: Annotated[Path, typer.Option(help="Folder with the artifact store.")] = Path("results"),
    log: Annotated[Path | None, typer.Option(help="Also write messages to this file.")] = None,
) -> None:
    """Options for every stage; they come before the command."""
    # `eagle3 plan` passes a class that records the job instead of running it.
    if log is not None and context.obj is None:
        console.log_to(log)
    job = context.obj or Job
    context.obj = job(configfiles=configfile or [], recipe=recipe, machine=machine, results=results)


@app.command(rich_help_panel=STAGES)
def target(context: typer.Context, output: Output) -> None:
    """Pin the target model: download it if necessary, and record exactly which one it is."""
    context.obj.produce("target", output, {})


@app.command(rich_help_panel=STAGES)
def synthetic(context: typer.Context, output: Output, target: TargetFile) -> None:
    """Let the target write user turns itself, for a prompt source with `synthetic: true`."""
    context.obj.produce("synthetic", output, {"target": target})


@app.command(rich_help_panel=STAGES)
def prompts(
    context: typer.Context,
    output: Output,
    sources: Annotated[
        list[Path] | None, typer.Argument(help="Files of the prompt sources, then those of evaluations.")
    ] = None,
    synthetic: Annotated[Path | None, typer.Option(help="User turns that the target wrote itself.")] = None,
) -> None:
    """Read prompt sources, check them, remove duplicates and divide them into parts."""
    context.obj.produce("prompts", output, {"synthetic": synthetic} if synthetic else {}, sources=sources or [])


@app.command(rich_help_panel=STAGES)
def responses(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    prompts: Annotated[Path, typer.Option(help="One part of the prompts.")],
) -> None:
    """Let the target answer every prompt; keep token-exact records."""
    context.obj.produce("responses", output, {"target": target, "prompts": prompts})


@app.command(rich_help_panel=STAGES)
def samples(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    responses: Annotated[list[Path], typer.Argument(help="Shards of raw responses.")],
) -> None:
    """Clean raw responses into token samples with spans; rejects keep their reason."""
    context.obj.produce("samples", output, {"target": target, "responses": responses})


@app.command(rich_help_panel=STAGES)
def dataset(
    context: typer.Context,
    output: Output,
    samples: Annotated[list[Path], typer.Argument(help="Samples of all parts.")],
) -> None:
    """Merge all samples, shuffle them and hold out conversations for evaluation."""
    context.obj.produce("dataset", output, {"samples": samples})


@app.command(rich_help_panel=STAGES)
def vocabulary(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    train: Annotated[Path, typer.Option(help="Training samples (dataset/train.jsonl.zst).")],
) -> None:
    """Choose the tokens that the draft can propose, from the training split only."""
    context.obj.produce("vocabulary", output, {"target": target, "train": train})


@app.command(rich_help_panel=STAGES)
def hidden_states(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    samples: Annotated[Path, typer.Option(help="Samples of one part.")],
) -> None:
    """Capture the target's hidden states for every sample, verified against the target's own next token."""
    context.obj.produce("hidden_states", output, {"target": target, "samples": samples})


@app.command(rich_help_panel=STAGES)
def draft(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    train: Annotated[Path, typer.Option(help="Training samples (dataset/train.jsonl.zst).")],
    evaluation: Evaluation,
    vocabulary: Annotated[Path, typer.Option(help="vocabulary.safetensors")],
    hidden_states: Shards,
) -> None:
    """Train the draft with the exact EAGLE-3 objective; resumes where it was stopped."""
    inputs = {"target": target, "train": train, "evaluation": evaluation, "vocabulary": vocabulary}
    context.obj.produce("draft", output, {**inputs, "hidden_states": hidden_states})


@app.command(rich_help_panel=STAGES)
def export(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    draft: Annotated[Path, typer.Option(help="model.safetensors of the trained draft.")],
) -> None:
    """Write the draft in the formats that vLLM and SGLang load, and check that it loads."""
    context.obj.produce("export", output, {"target": target, "draft": draft}, beside=[draft.with_name("draft.json")])


@app.command(rich_help_panel=STAGES)
def acceptance_simulated(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    evaluation: Evaluation,
    hidden_states: Shards,
    draft: Annotated[Path, typer.Option(help="model.safetensors of the trained draft.")],
) -> None:
    """Replay serving over held-out responses: acceptance length without an engine."""
    inputs = {"target": target, "evaluation": evaluation, "draft": draft}
    beside = [draft.with_name("draft.json")]
    context.obj.produce("acceptance_simulated", output, {**inputs, "hidden_states": hidden_states}, beside=beside)


@app.command(rich_help_panel=STAGES)
def acceptance_served(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    evaluation: Evaluation,
    export: Annotated[Path, typer.Option(help="config.json of the exported draft (plain format).")],
) -> None:
    """Serve held-out prompts with and without the draft, in the configured engine."""
    inputs = {"target": target, "evaluation": evaluation, "export": export}
    context.obj.produce("acceptance_served", output, inputs, beside=[export.with_name("model.safetensors")])


@app.command(rich_help_panel=STAGES)
def report(
    context: typer.Context,
    output: Output,
    target: TargetFile,
    train: Annotated[Path, typer.Option(help="Training samples (dataset/train.jsonl.zst).")],
    training_log: Annotated[Path, typer.Option(help="log.jsonl of the draft.")],
    draft_metrics: Annotated[Path, typer.Option(help="metrics.json of the draft.")],
    prompts_stats: Annotated[Path, typer.Option(help="stats.json of the prompts.")],
    dataset_stats: Annotated[Path, typer.Option(help="stats.json of the dataset.")],
    vocabulary_stats: Annotated[Path, typer.Option(help="stats.json of the vocabulary.")],
    simulated: Annotated[Path, typer.Option(help="acceptance.json, simulated.")],
    served: Annotated[Path, typer.Option(help="acceptance.json, served.")],
    stats: Annotated[list[Path], typer.Argument(help="stats.json of all samples and of all hidden states.")],
) -> None:
    """Show what the run found: training curves, acceptance, lengths, rejects, coverage, and a few samples."""
    inputs = {
        "target": target,
        "train": train,
        "training_log": training_log,
        "draft_metrics": draft_metrics,
        "prompts_stats": prompts_stats,
        "dataset_stats": dataset_stats,
        "vocabulary_stats": vocabulary_stats,
        "acceptance": [simulated, served],
        "samples_stats": [file for file in stats if file.parts[-3] == "samples"],
        "hidden_states_stats": [file for file in stats if file.parts[-3] == "hidden_states"],
    }
    context.obj.produce("report", output, inputs)


def main() -> None:
    """Run the command line; errors that a user can fix end with a message instead of a traceback."""
    try:
        app()
    except Eagle3Error as error:
        console.fail(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        console.fail("stopped; run the same command again to continue")
        sys.exit(130)
    except Exception:
        console.fail("this is a bug in eagle3:\n" + traceback.format_exc())
        sys.exit(70)
