# What all rules share: the checked configuration and the places of files.

import eagle3.artifacts.workflow

FLOW = eagle3.artifacts.workflow.Workflow(config)
PARTS = list(FLOW.parts)
GPUS = FLOW.config.machine.gpus
THREADS = FLOW.config.machine.threads


pathvars:
    results=f"results/{FLOW.config.run}",
    logs=f"results/{FLOW.config.run}/logs",
    benchmarks=f"results/{FLOW.config.run}/benchmarks",


wildcard_constraints:
    part=r"\d+",
    shard=r"\d+",
