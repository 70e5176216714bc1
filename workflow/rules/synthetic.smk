rule synthetic:
    """Let the target write user turns itself, for a prompt source with `synthetic: true`.

    A record holds id and messages: one user message. Part of the workflow only where such a source is configured.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
    output:
        prompts="<results>/synthetic/prompts.jsonl.zst",
        rejects="<results>/synthetic/rejects.jsonl.zst",
        stats="<results>/synthetic/stats.json",
        manifest="<results>/synthetic/manifest.json",
    log:
        "<logs>/synthetic.log",
    benchmark:
        "<benchmarks>/synthetic.tsv"
    threads: THREADS
    resources:
        mem_mb=4000,
        runtime=1440,
        gpu=GPUS,
        machine=FLOW.machine,
    params:
        recipe=FLOW.recipe("synthetic"),
        results=subpath(output.manifest, ancestor=3),
    shell:
        "eagle3 --recipe {params.recipe:q} --machine {resources.machine:q} --results {params.results:q} --log {log:q} synthetic"
        " --target {input.target:q} --output {output.manifest:q}"


# What others read of it: nothing, unless the target is to write prompts.
SYNTHETIC = list(rules.synthetic.output) if FLOW.config.prompts.synthetic else []
