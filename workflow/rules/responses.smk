rule responses_part:
    """Generate the target's answers to the prompts of one part, turn by turn.

    In: the target; the part's prompts.
    Out: shards of one record per conversation: messages, and for every turn the sampling parameters, prompt and
    generated token ids, finish reason, engine and versions. A failed conversation keeps its error.
    Wildcards: part.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        prompts="<results>/prompts/part-{part}.jsonl.zst",
    output:
        shards=expand(
            "<results>/responses/part-{{part}}/shard-{shard}.jsonl.zst",
            shard=range(FLOW.config.responses.shards),
        ),
        manifest="<results>/responses/part-{part}/manifest.json",
    log:
        "<logs>/responses/part-{part}.log",
    benchmark:
        "<benchmarks>/responses/part-{part}.tsv"
    threads: THREADS
    resources:
        mem_mb=4000,
        runtime=1440,
        gpu=GPUS if FLOW.config.prompts.regenerate else 0,
        machine=FLOW.machine,
    params:
        recipe=FLOW.recipe("responses"),
        results=subpath(output.manifest, ancestor=4),
    shell:
        "eagle3 --recipe {params.recipe:q} --machine {resources.machine:q} --results {params.results:q}"
        " --log {log:q} responses"
        " --target {input.target:q} --prompts {input.prompts:q}"
        " --output {output.manifest:q}"


rule responses:
    """Generate the responses of all parts."""
    input:
        shards=expand(
            "<results>/responses/part-{part}/shard-{shard}.jsonl.zst",
            part=PARTS,
            shard=range(FLOW.config.responses.shards),
        ),
        manifests=expand("<results>/responses/part-{part}/manifest.json", part=PARTS),
