rule draft:
    """Train the draft model with the EAGLE-3 objective; resumes from its last checkpoint.

    In: the target (lm_head and final norm); training and held-out samples; the draft vocabulary; the hidden states.
    Out: model.safetensors, the weights in float32 with the best held-out acceptance length; draft.json, the draft
    model's configuration; log.jsonl, a line every `log_every` optimizer steps; metrics.json, held-out metrics.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        train=rules.dataset.output.train,
        evaluation=rules.dataset.output.evaluation,
        vocabulary=rules.vocabulary.output.vocabulary,
        hidden_states=rules.hidden_states.input.shards,
    output:
        draft="<results>/draft/model.safetensors",
        config="<results>/draft/draft.json",
        log="<results>/draft/log.jsonl",
        metrics="<results>/draft/metrics.json",
        manifest="<results>/draft/manifest.json",
    log:
        "<logs>/draft.log",
    benchmark:
        "<benchmarks>/draft.tsv"
    threads: THREADS
    resources:
        mem_mb=6000,
        runtime=2880,
        gpu=GPUS,
        machine=FLOW.machine,
    params:
        recipe=FLOW.recipe("draft"),
        results=subpath(output.manifest, ancestor=3),
    shell:
        "eagle3 --recipe {params.recipe:q} --machine {resources.machine:q} --results {params.results:q}"
        " --log {log:q} draft"
        " --target {input.target:q} --train {input.train:q} --evaluation {input.evaluation:q}"
        " --vocabulary {input.vocabulary:q}"
        " --output {output.manifest:q} {input.hidden_states:q}"


# Reject a training that this machine cannot run now, not when its job starts.
FLOW.check_training(rules.draft.output.manifest)
