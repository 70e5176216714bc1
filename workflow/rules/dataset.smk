rule dataset:
    """Merge all samples, reject answers that repeat others, shuffle by hash and hold out whole conversations."""
    input:
        samples=expand("<results>/samples/part-{part}/samples.jsonl.zst", part=PARTS),
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
    shell:
        "eagle3 --recipe {params.recipe:q} --log {log:q} dataset" " --output {output.manifest:q} {input.samples:q}"
