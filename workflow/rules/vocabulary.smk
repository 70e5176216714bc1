rule vocabulary:
    """Choose the draft's tokens from what the target generated in the training split.

    d2t [Vd] int64 (target id = i + d2t[i]), t2d [V] bool, counts [V] int64; coverage in the metadata.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        train=rules.dataset.output.train,
    output:
        vocabulary="<results>/vocabulary/vocabulary.safetensors",
        stats="<results>/vocabulary/stats.json",
        manifest="<results>/vocabulary/manifest.json",
    log:
        "<logs>/vocabulary.log",
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        recipe=FLOW.recipe("vocabulary"),
        results=subpath(output.manifest, ancestor=3),
    shell:
        "eagle3 --recipe {params.recipe:q} --results {params.results:q} --log {log:q} vocabulary"
        " --target {input.target:q} --train {input.train:q}"
        " --output {output.manifest:q}"
