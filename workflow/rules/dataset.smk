rule dataset:
    """Merge the samples of all parts, remove repeated answers, shuffle and split.

    In: the samples of all parts.
    Out: train.jsonl.zst and eval.jsonl.zst, in the records of `samples`; whole conversations are held out, per source.
    rejects.jsonl.zst, the repeated answers; stats.json with counts per source.
    """
    input:
        samples=rules.samples.input.samples,
    output:
        train="<results>/dataset/train.jsonl.zst",
        evaluation="<results>/dataset/eval.jsonl.zst",
        rejects="<results>/dataset/rejects.jsonl.zst",
        stats="<results>/dataset/stats.json",
        manifest="<results>/dataset/manifest.json",
    log:
        "<logs>/dataset.log",
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        recipe=FLOW.recipe("dataset"),
        results=subpath(output.manifest, ancestor=3),
    shell:
        "eagle3 --recipe {params.recipe:q} --results {params.results:q} --log {log:q} dataset"
        " --output {output.manifest:q} {input.samples:q}"
