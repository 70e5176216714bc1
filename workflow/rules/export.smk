rule export:
    """Write the draft as vLLM and SGLang load it, and check that every tensor is used."""
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
