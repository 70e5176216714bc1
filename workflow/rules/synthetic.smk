rule synthetic:
    """Sample user turns from the target itself, for a prompt source with `synthetic: true`.

    Only part of the workflow if such a source is configured.
    In: the target.
    Out: prompts.jsonl.zst, one record per usable turn (id, messages: one user message); rejects.jsonl.zst, the others
    with a reason; stats.json.
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
        "eagle3 --recipe {params.recipe:q} --machine {resources.machine:q} --results {params.results:q}"
        " --log {log:q} synthetic"
        " --target {input.target:q} --output {output.manifest:q}"


# Inputs of other rules: none unless the target writes prompts itself.
SYNTHETIC = list(rules.synthetic.output) if FLOW.config.prompts.synthetic else []
