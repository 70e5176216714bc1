# Shared by all rules: the validated configuration and the paths.
# In rules, `results` is the folder that holds the runs and the store; a module's prefix is part of it.

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
