rule dataset:
    """Merge all samples, reject answers that repeat others, shuffle by hash and hold out whole conversations."""
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
