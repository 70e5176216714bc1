"""Commands that look at a run: plan it, find what can be freed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3 import console
from eagle3.artifacts.job import Job

app = typer.Typer()
TOOLS = "Tools"


@app.command(rich_help_panel=TOOLS, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def plan(context: typer.Context) -> None:
    """Say per stage what a run would compute, adopt or leave, with tokens and disk.

    Extra arguments go to Snakemake: `eagle3 plan --configfile config/kimi-k2.5.yaml`.
    """
    from eagle3.artifacts.plan import make_plan

    job: Job = context.obj
    plan = make_plan(job.store, context.args)
    rows = [
        (
            row.stage,
            row.jobs,
            row.up_to_date,
            row.adopted,
            row.computed,
            row.tokens or "",
            console.size(row.bytes),
        )
        for row in plan.rows
    ]
    headings = ("stage", "jobs", "up to date", "adopted", "to compute", "tokens", "disk")
    console.table("what `snakemake` would do", rows, headings)
    console.say(f"to be written: {console.size(plan.bytes)}; free on this disk: {console.size(plan.free)}")
    if plan.bytes > plan.free:
        console.fail("the disk does not hold it: free space first (`eagle3 gc`), or store hidden states as fp8")
        raise typer.Exit(1)


@app.command(rich_help_panel=TOOLS)
def gc(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Delete what is listed.")] = False,
) -> None:
    """List what the store holds and no run refers to; delete it only with --yes."""
    from eagle3.artifacts.gc import free, unused

    job: Job = context.obj
    rows = unused(job.store)
    if not rows:
        console.say("nothing to free: every artifact is in use")
        return
    console.table(
        "not referred to by any run",
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
    prompts: Annotated[Path, typer.Option(help="A part of the prompts; its first ones are asked.")],
    count: Annotated[int, typer.Option(help="How many prompts.")] = 16,
) -> None:
    """Find the number of requests in flight that a server answers fastest (needs --config before the command).

    Writes tuning/concurrency.svg and tuning/concurrency.yaml into the run's results; give the latter to Snakemake as a
    second configuration: `snakemake --configfile yours.yaml results/yours/tuning/concurrency.yaml`.
    """
    from eagle3.cli.tuning import tune

    job: Job = context.obj
    configuration = job.configuration()
    folder = job.store.results / configuration.run / "tuning"
    rows, best = tune(configuration, target, prompts, count, folder)
    console.table("answers by requests in flight", [tuple(row.values()) for row in rows], tuple(rows[0]))
    console.say(f"recommended: `machine.concurrency: {best}`, written to {folder / 'concurrency.yaml'}")


@app.command(rich_help_panel=TOOLS)
def verify(
    paths: Annotated[list[Path], typer.Argument(help="Hidden-state shards, or folders that hold them.")],
    target: Annotated[
        Path | None, typer.Option(help="target.json: also compute the teacher's tokens of some samples again.")
    ] = None,
    parity: Annotated[
        bool, typer.Option("--parity", help="Also capture some samples again with transformers (needs --target).")
    ] = False,
    samples: Annotated[int, typer.Option(help="How many samples --target and --parity look at.")] = 8,
    threads: Annotated[int, typer.Option(help="Threads for reading.")] = 2,
) -> None:
    """Check every byte of stored hidden states; exit code 1 on any fault. Works while a capture runs."""
    from eagle3.cli.verify import print_report, verify_files

    report = verify_files(paths, pin=target, parity=parity, samples=samples, threads=threads)
    print_report(report)
    if not report.ok:
        raise typer.Exit(1)
