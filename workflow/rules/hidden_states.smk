rule hidden_states_part:
    """Capture the target's hidden states for the samples of one part.

    In: the target; the part's samples.
    Out: shards that hold, for a sample of n tokens, token_ids int32 [n], the residual stream entering each auxiliary
    layer, bf16 [n, H], and the last layer's output, bf16 [m, H], at the m positions in last_rows
    (docs/hidden-states.md); stats.json with counts and the agreement with the engine's own next tokens.
    Wildcards: part.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        samples=rules.samples_part.output.samples,
    output:
        shards=expand(
            "<results>/hidden_states/part-{{part}}/shard-{shard}.safetensors",
            shard=range(FLOW.config.hidden_states.shards),
        ),
        stats="<results>/hidden_states/part-{part}/stats.json",
        manifest="<results>/hidden_states/part-{part}/manifest.json",
    log:
        "<logs>/hidden_states/part-{part}.log",
    benchmark:
        "<benchmarks>/hidden_states/part-{part}.tsv"
    threads: THREADS
    resources:
        mem_mb=4000,
        runtime=1440,
        gpu=GPUS,
        machine=FLOW.machine,
    params:
        recipe=FLOW.recipe("hidden_states"),
        results=subpath(output.manifest, ancestor=4),
    shell:
        "eagle3 --recipe {params.recipe:q} --machine {resources.machine:q} --results {params.results:q}"
        " --log {log:q} hidden-states"
        " --target {input.target:q} --samples {input.samples:q}"
        " --output {output.manifest:q}"


rule hidden_states:
    """Capture the hidden states of all parts."""
    input:
        shards=expand(
            "<results>/hidden_states/part-{part}/shard-{shard}.safetensors",
            part=PARTS,
            shard=range(FLOW.config.hidden_states.shards),
        ),
        stats=expand("<results>/hidden_states/part-{part}/stats.json", part=PARTS),
        manifests=expand("<results>/hidden_states/part-{part}/manifest.json", part=PARTS),
