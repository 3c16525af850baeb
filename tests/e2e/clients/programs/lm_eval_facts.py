"""Run a folder's task in lm-eval, with a server's likelihoods; print its results and samples.

The command line would first read the 14,000 tasks that come with lm-eval.
"""

from __future__ import annotations

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASK = "appliance_facts"

base_url, folder = sys.argv[1:]
found = simple_evaluate(
    model="local-completions",
    model_args={
        "model": "small",
        "base_url": f"{base_url}/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 2,
        "max_retries": 1,
    },
    tasks=[TASK],
    batch_size=3,
    task_manager=TaskManager(include_path=folder, include_defaults=False),
)
told = {"results": found["results"][TASK], "samples": found["samples"][TASK]}
json.dump(told, sys.stdout, default=str)
