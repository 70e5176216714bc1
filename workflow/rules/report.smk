rule report:
    """Draw what the run found; every figure goes into `snakemake --report`."""
    input:
        stats=[
            rules.draft.output.log,
            rules.draft.output.metrics,
            rules.acceptance_simulated.output.acceptance,
            rules.acceptance_served.output.acceptance,
            rules.dataset.output.stats,
            rules.vocabulary.output.stats,
            *expand(rules.samples_part.output.stats, part=PARTS),
            *expand(rules.hidden_states_part.output.stats, part=PARTS),
        ],
    output:
        manifest="<results>/report/manifest.json",
    log:
        "<logs>/report.log",
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        recipe=FLOW.recipe("report"),
    shell:
        "eagle3 --recipe {params.recipe:q} --log {log:q} report"
        " --output {output.manifest:q} {input.stats:q}"
