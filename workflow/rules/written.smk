rule written:
    """Let the target write user turns itself, for a prompt source with `self: true`.

    A record holds id and messages: one user message. Part of the workflow only where such a source is configured.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
    output:
        prompts="<results>/written/prompts.jsonl.zst",
        rejects="<results>/written/rejects.jsonl.zst",
        stats="<results>/written/stats.json",
        manifest="<results>/written/manifest.json",
    log:
        "<logs>/written.log",
    benchmark:
        "<benchmarks>/written.tsv"
    threads: THREADS
    resources:
        mem_mb=4000,
        runtime=1440,
        gpu=GPUS,
        machine=FLOW.machine,
    params:
        recipe=FLOW.recipe("written"),
    shell:
        "eagle3 --recipe {params.recipe:q} --machine {resources.machine:q} --log {log:q} written"
        " --target {input.target:q} --output {output.manifest:q}"


# What others read of it: nothing, unless the target is to write prompts.
WRITTEN = list(rules.written.output) if FLOW.config.prompts.written else []
