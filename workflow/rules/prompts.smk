rule prompts:
    """Read the prompt sources and divide them into parts.

    A record holds id (hash of the content), source and messages; a prompt's part follows from its id.
    """
    input:
        # Paths of the user's own files: relative to the working directory, whatever the module's prefix.
        sources=local(FLOW.outside_files("prompts")),
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
        results=subpath(output.manifest, ancestor=3),
    shell:
        "eagle3 --recipe {params.recipe:q} --results {params.results:q} --log {log:q} prompts --output {output.manifest:q}"
        + (" --synthetic {input.synthetic:q}" if SYNTHETIC else "")
        + " {input.sources:q}"
