rule vocabulary:
    """Choose the draft vocabulary from the tokens that the target generated in the training split.

    In: the target; the training samples.
    Out: vocabulary.safetensors with, for Vd draft tokens and V target tokens, d2t int64 [Vd] (target id = i + d2t[i]),
    t2d bool [V] (whether a token is in the draft vocabulary) and counts int64 [V]; stats.json with the coverage, in
    total and per source.
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
