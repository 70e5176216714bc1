rule export:
    """Export the draft model in the format of vLLM and SGLang, and check that it drafts as in training.

    In: the target; the draft model.
    Out: plain/, a model folder: config.json and model.safetensors in bf16; with `export.speculators` also speculators/.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        draft=rules.draft.output.draft,
        config=rules.draft.output.config,
    output:
        config="<results>/export/plain/config.json",
        model="<results>/export/plain/model.safetensors",
        manifest="<results>/export/manifest.json",
    log:
        "<logs>/export.log",
    resources:
        mem_mb=3000,
        runtime=60,
    params:
        recipe=FLOW.recipe("export"),
        results=subpath(output.manifest, ancestor=3),
    shell:
        "eagle3 --recipe {params.recipe:q} --results {params.results:q} --log {log:q} export"
        " --target {input.target:q} --draft {input.draft:q}"
        " --output {output.manifest:q}"
