rule samples_part:
    """Clean the responses of one part and turn them into token samples.

    In: the target (chat template, tokenizer); the part's responses.
    Out: samples.jsonl.zst (id, conversation, source, turn, input_ids, and spans: the token ranges [start, end) that the
    target generated); rejects.jsonl.zst with reasons; stats.json with counts and lengths in tokens.
    Wildcards: part.
    """
    input:
        target=rules.target.output.target,
        model=rules.target.output.model,
        responses=rules.responses_part.output.shards,
    output:
        samples="<results>/samples/part-{part}/samples.jsonl.zst",
        rejects="<results>/samples/part-{part}/rejects.jsonl.zst",
        stats="<results>/samples/part-{part}/stats.json",
        manifest="<results>/samples/part-{part}/manifest.json",
    log:
        "<logs>/samples/part-{part}.log",
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        recipe=FLOW.recipe("samples"),
        results=subpath(output.manifest, ancestor=4),
    shell:
        "eagle3 --recipe {params.recipe:q} --results {params.results:q} --log {log:q} samples"
        " --target {input.target:q}"
        " --output {output.manifest:q} {input.responses:q}"


rule samples:
    """Clean the responses of all parts."""
    input:
        samples=expand("<results>/samples/part-{part}/samples.jsonl.zst", part=PARTS),
        rejects=expand("<results>/samples/part-{part}/rejects.jsonl.zst", part=PARTS),
        stats=expand("<results>/samples/part-{part}/stats.json", part=PARTS),
        manifests=expand("<results>/samples/part-{part}/manifest.json", part=PARTS),
