rule prompts:
    """Read the prompt sources, remove duplicates and divide the prompts into parts.

    In: the files of the sources and of the evaluation prompts to exclude; the synthetic user turns, if configured.
    Out: one file per part, one record per conversation (id: hash of its content, source, messages), sorted by id, which
    also decides the part; rejects.jsonl.zst with reasons; stats.json with counts per source.
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
