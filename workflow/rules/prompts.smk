rule prompts:
    """Read the prompt sources and divide them into parts.

    A record holds id (hash of the content), source and messages; a prompt's part follows from its id.
    """
    input:
        sources=FLOW.prompt_sources(),
        synthetic=SYNTHETIC[:1],
    output:
        parts=expand("<results>/prompts/part-{part}.jsonl.zst", part=PARTS),
        rejects="<results>/prompts/rejects.jsonl.zst",
        stats="<results>/prompts/stats.json",
        manifest="<results>/prompts/manifest.json",
    log:
        "<logs>/prompts.log",
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        recipe=FLOW.recipe("prompts"),
    shell:
        "eagle3 --recipe {params.recipe:q} --log {log:q} prompts --output {output.manifest:q}"
        + (" --synthetic {input.synthetic:q}" if SYNTHETIC else "")
        + " {input.sources:q}"
