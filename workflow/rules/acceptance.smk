rule acceptance_simulated:
    """Measure acceptance on held-out responses and their hidden states, without an engine.

    In: the target; held-out samples and the hidden states of all parts; the draft model.
    Out: acceptance.json: acceptance length (tokens per verification step) and acceptance per draft position, in total
    and per source.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        evaluation=rules.dataset.output.evaluation,
        hidden_states=rules.draft.input.hidden_states,
        draft=rules.draft.output.draft,
        config=rules.draft.output.config,
    output:
        acceptance="<results>/acceptance/simulated/acceptance.json",
        manifest="<results>/acceptance/simulated/manifest.json",
    log:
        "<logs>/acceptance/simulated.log",
    threads: THREADS
    resources:
        mem_mb=4000,
        runtime=240,
        gpu=GPUS,
        machine=FLOW.machine,
    params:
        recipe=FLOW.recipe("acceptance_simulated"),
        results=subpath(output.manifest, ancestor=4),
    shell:
        "eagle3 --recipe {params.recipe:q} --machine {resources.machine:q} --results {params.results:q}"
        " --log {log:q} acceptance-simulated"
        " --target {input.target:q} --evaluation {input.evaluation:q} --draft {input.draft:q}"
        " --output {output.manifest:q} {input.hidden_states:q}"


rule acceptance_served:
    """Measure acceptance in the engine: serve held-out prompts with and without the draft model.

    In: the target; held-out samples; the exported draft model.
    Out: acceptance.json: acceptance length and acceptance per draft position, in total and per source, and whether the
    answers are the same with and without the draft model.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        evaluation=rules.dataset.output.evaluation,
        export=rules.export.output.config,
        draft=rules.export.output.model,
    output:
        acceptance="<results>/acceptance/served/acceptance.json",
        manifest="<results>/acceptance/served/manifest.json",
    log:
        "<logs>/acceptance/served.log",
    benchmark:
        "<benchmarks>/acceptance/served.tsv"
    threads: THREADS
    resources:
        mem_mb=4000,
        runtime=240,
        gpu=GPUS,
        machine=FLOW.machine,
    params:
        recipe=FLOW.recipe("acceptance_served"),
        results=subpath(output.manifest, ancestor=4),
    shell:
        "eagle3 --recipe {params.recipe:q} --machine {resources.machine:q} --results {params.results:q}"
        " --log {log:q} acceptance-served"
        " --target {input.target:q} --evaluation {input.evaluation:q} --export {input.export:q}"
        " --output {output.manifest:q}"


rule acceptance:
    """Measure the draft model, simulated and served."""
    input:
        rules.acceptance_simulated.output.manifest,
        rules.acceptance_served.output.manifest,
