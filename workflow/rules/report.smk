rule report:
    """Draw the figures and pages for `snakemake --report`.

    In: the target; training samples; the draft's log and metrics; the stats of all stages; both acceptance.json.
    Out: summary.html, samples.html and one SVG per figure.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        train=rules.dataset.output.train,
        log=rules.draft.output.log,
        metrics=rules.draft.output.metrics,
        prompts=rules.prompts.output.stats,
        dataset=rules.dataset.output.stats,
        vocabulary=rules.vocabulary.output.stats,
        simulated=rules.acceptance_simulated.output.acceptance,
        served=rules.acceptance_served.output.acceptance,
        stats=[*rules.samples.input.stats, *rules.hidden_states.input.stats],
    output:
        summary=report("<results>/report/summary.html", caption="../report/summary.rst", category="Summary"),
        samples=report("<results>/report/samples.html", caption="../report/samples.rst", category="Data"),
        training=report("<results>/report/training.svg", caption="../report/training.rst", category="Training"),
        positions=report(
            "<results>/report/acceptance_positions.svg",
            caption="../report/acceptance_positions.rst",
            category="Acceptance",
        ),
        sources=report(
            "<results>/report/acceptance_sources.svg",
            caption="../report/acceptance_sources.rst",
            category="Acceptance",
        ),
        lengths=report("<results>/report/lengths.svg", caption="../report/lengths.rst", category="Data"),
        rejects=report("<results>/report/rejects.svg", caption="../report/rejects.rst", category="Data"),
        coverage=report("<results>/report/coverage.svg", caption="../report/coverage.rst", category="Data"),
        manifest="<results>/report/manifest.json",
    log:
        "<logs>/report.log",
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        recipe=FLOW.recipe("report"),
        results=subpath(output.manifest, ancestor=3),
    shell:
        "eagle3 --recipe {params.recipe:q} --results {params.results:q} --log {log:q} report"
        " --target {input.target:q} --train {input.train:q}"
        " --training-log {input.log:q} --draft-metrics {input.metrics:q}"
        " --prompts-stats {input.prompts:q} --dataset-stats {input.dataset:q} --vocabulary-stats {input.vocabulary:q}"
        " --simulated {input.simulated:q} --served {input.served:q}"
        " --output {output.manifest:q} {input.stats:q}"
