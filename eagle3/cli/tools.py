"""Commands that look at a run: plan it, keep artifacts of earlier code, find what can be freed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3 import console
from eagle3.artifacts.job import Job
from eagle3.errors import Eagle3Error

if TYPE_CHECKING:
    from eagle3.artifacts.plan import StagePlan

app = typer.Typer()
TOOLS = "Tools"


@app.command(rich_help_panel=TOOLS, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def plan(context: typer.Context) -> None:
    """Show what a run would compute, adopt from the store or leave unchanged: tokens and disk space by stage.

    Takes the same arguments as snakemake: `eagle3 plan --configfile config/kimi-k2.5.yaml`.
    """
    from eagle3.artifacts.plan import make_plan

    job: Job = context.obj
    root = context.find_root().command
    plan = make_plan(job.store, context.args, lambda words, note: root.main(words, obj=note, standalone_mode=False))
    rows = [
        (
            stage.stage,
            stage.jobs,
            stage.up_to_date,
            stage.adopted,
            stage.computed,
            stage.tokens or "",
            console.size(stage.bytes),
        )
        for stage in plan.stages
    ]
    headings = ("stage", "jobs", "up to date", "adopted", "to compute", "tokens", "disk")
    console.table("what `snakemake` would do", rows, headings)
    console.say(f"to be written: {console.size(plan.bytes)}; free on this disk: {console.size(plan.free)}")
    for stage in plan.stages:
        if stage.acceptable:
            console.say(_could_accept(stage))
    if plan.bytes > plan.free:
        console.fail("this does not fit on the disk: free space first (`eagle3 gc`), or store hidden states as fp8")
        raise typer.Exit(1)


def _could_accept(stage: StagePlan) -> str:
    saved = f"{stage.acceptable_tokens:,} tokens, " if stage.acceptable_tokens else ""
    return (
        f"{stage.stage}: {stage.acceptable} of the {stage.computed} to compute were made from the same settings and "
        f"inputs by earlier code ({saved}{console.size(stage.acceptable_bytes)}); if the code change does not "
        f"affect them, keep them with `eagle3 accept {stage.stage}`"
    )


@app.command(rich_help_panel=TOOLS)
def accept(
    context: typer.Context,
    stages: Annotated[list[str], typer.Argument(metavar="STAGE", help="Stages whose artifacts stay valid.")],
    run: Annotated[str | None, typer.Option(help="Only artifacts of results/RUN; by default, of all runs.")] = None,
) -> None:
    """Declare that finished artifacts of earlier code stay valid under today's code.

    By default, any edit of the code that makes an artifact recomputes it. You may know better, for example after
    rewording an error message:

        eagle3 plan                             # says what could be kept

        eagle3 accept responses hidden_states   # keeps it

        snakemake --cores 8                     # adopts it, computes nothing

    The artifacts are linked into the store under their new key. The manifest records who accepted them, when, and the
    fingerprint of the code that made them.
    """
    from eagle3.artifacts.accept import accept as accept_stage

    job: Job = context.obj
    found = [
        (stage, artifact) for stage in stages for artifact in accept_stage(job.store, stage.replace("-", "_"), run)
    ]
    if not found:
        raise Eagle3Error("no artifacts to accept", where=job.store.results, found=f"none of {', '.join(stages)}")
    rows = [(stage, str(artifact.folder), console.size(artifact.bytes), artifact.outcome) for stage, artifact in found]
    console.table("artifacts of earlier code", rows, ("stage", "folder", "size", "outcome"))
    if any(artifact.refused for _, artifact in found):
        console.fail("the next run recomputes what cannot be accepted")
        raise typer.Exit(1)


@app.command(rich_help_panel=TOOLS)
def gc(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Delete what is listed.")] = False,
) -> None:
    """List artifacts and work in the store that no run uses; delete them only with --yes."""
    from eagle3.artifacts.gc import free, unused

    job: Job = context.obj
    rows = unused(job.store)
    if not rows:
        console.say("nothing to free: every artifact is in use")
        return
    console.table(
        "not used by any run",
        [(str(row.path), row.kind, console.size(row.bytes)) for row in rows],
        ("folder", "kind", "size"),
    )
    total = console.size(sum(row.bytes for row in rows))
    if yes:
        free(rows)
        console.say(f"freed {total}")
    else:
        console.say(f"{total} would be freed by `eagle3 gc --yes`")


@app.command(rich_help_panel=TOOLS)
def show(
    file: Annotated[Path, typer.Argument(help="A file of samples, rejects, responses or prompts.")],
    sample: Annotated[str | None, typer.Option(help="Id of the sample; by default the first ones.")] = None,
    target: Annotated[Path | None, typer.Option(help="target.json, to turn ids into text.")] = None,
    count: Annotated[int, typer.Option(help="How many to show.")] = 3,
) -> None:
    """Show samples as text, coloured by who wrote it: system, user, reasoning, answer, special tokens."""
    from eagle3.cli.show import show_records

    show_records(file, sample=sample, target=target, count=count)


@app.command(rich_help_panel=TOOLS)
def tune_concurrency(
    context: typer.Context,
    target: Annotated[Path, typer.Option(help="target.json of the pinned target.")],
    prompts: Annotated[Path, typer.Option(help="A part of the prompts; the first ones are sent.")],
    configfile: Annotated[list[Path], typer.Option(help="Configuration file; repeat to override section by section.")],
    count: Annotated[int, typer.Option(help="How many prompts.")] = 16,
) -> None:
    """Find the number of concurrent requests at which a server is fastest.

    Writes tuning/concurrency.svg and tuning/concurrency.yaml into the run's results; give the latter to Snakemake as a
    second configuration: `snakemake --configfile yours.yaml results/yours/tuning/concurrency.yaml`.
    """
    from eagle3.cli.tuning import tune
    from eagle3.config.configuration import load

    job: Job = context.obj
    configuration = load(configfile)
    folder = job.store.results / configuration.run / "tuning"
    rows, best = tune(configuration, target, prompts, count, folder)
    console.table("speed by concurrent requests", [tuple(row.values()) for row in rows], tuple(rows[0]))
    console.say(f"recommended: `machine.concurrency: {best}`, written to {folder / 'concurrency.yaml'}")


@app.command(rich_help_panel=TOOLS)
def verify(
    paths: Annotated[list[Path], typer.Argument(help="Hidden-state shards, or folders that hold them.")],
    target: Annotated[
        Path | None, typer.Option(help="target.json: also recompute the teacher's tokens of some samples.")
    ] = None,
    parity: Annotated[
        bool, typer.Option("--parity", help="Also recapture some samples with transformers (needs --target).")
    ] = False,
    samples: Annotated[int, typer.Option(help="How many samples --target and --parity check.")] = 8,
    threads: Annotated[int, typer.Option(help="Threads for reading.")] = 2,
) -> None:
    """Check every byte of stored hidden states; exit code 1 on any fault. Works while a capture runs."""
    from eagle3.cli.verify import print_report, verify_files

    report = verify_files(paths, pin=target, parity=parity, samples=samples, threads=threads)
    print_report(report)
    if not report.ok:
        raise typer.Exit(1)
