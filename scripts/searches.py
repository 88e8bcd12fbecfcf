"""Checks that the site's search finds the right page first, for what people search.

    python scripts/searches.py [SITE]

SITE is the folder that `make docs` made (default: build/site). The site's own search program and index
answer, in Node.js. Prints each search that finds another page first, and exits with 1 if there is one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TROUBLE, COOKBOOK, FIELDS = "troubleshooting/", "tutorials/cookbook/", "reference/fields/"
SEARCHES = {
    "out of memory": TROUBLE,
    "OOM": TROUBLE,
    "nan": TROUBLE,
    "slow": TROUBLE,
    "stuck": TROUBLE,
    "disk full": TROUBLE,
    "will not resume": TROUBLE,
    "resume on 8 gpus": TROUBLE,
    "wandb": COOKBOOK,
    "lora merge": COOKBOOK,
    "learning rate sweep": COOKBOOK,
    "sharegpt": COOKBOOK,
    "early stopping": COOKBOOK,
    "figure paper": COOKBOOK,
    "install": "start/installing/",
    "windows": "start/macos-and-windows/",
    "macos": "start/macos-and-windows/",
    "ray": "engines/",
    "kubeflow": "engines/",
    "slurm": "schedulers/",
    "kubernetes": "schedulers/",
    "exit codes": "reference/errors/",
    "spot instances": "tutorials/spot-instances/",
    "torchtitan": "why-not/",
    "trainium": "trainium/",
    "checkpoint format": "checkpoint-format/",
    "tensor parallel": "parallelism/",
    "packing": "data/",
    "upgrading": "stability/",
    "own loop": "tutorials/own-loop/",
    "performance": "performance/",
    "recipe fields": FIELDS,
    "metrics.jsonl": "metrics/",
    "prometheus": "metrics/",
    "muon": "optimizers/",
    "pipeline schedules": "pipelines/",
    "mixtures of experts": "experts/",
    "sharded parameters": "sharding/",
    "state.json": "checkpoint-values/",
    "status.json": "run-folder/",
    "nfs": "operations/",
    "qlora": "limits/",
    "reproducibility": "faq/",
    "docker": "faq/",
    "jupyter": "faq/",
    "vllm": "faq/",
    "gguf": "faq/",
    "hyperpod": "aws-clusters/",
    "parallelcluster": "aws-clusters/",
    "sagemaker": "aws-clusters/",
    "eks": "aws/",
    "aws batch": "aws/",
    "karpenter": "aws/",
    "mfu": "faq/",
    "profiler": "performance/",
    "drill": "drill/",
    "rehearsal": "drill/",
    "snapshots": "memory/",
    "s3": "object-storage/",
}


# The program is a web worker: it gets the index in one message and searches in others, and posts its answers.
SHIM = """
const fs = require("fs");
const [program, index, searches] = process.argv.slice(1);
globalThis.self = globalThis;
let listen;
globalThis.addEventListener = (_, listener) => { listen = listener; };
const answers = [];
globalThis.postMessage = (message) => answers.push(message);
(0, eval)(fs.readFileSync(program, "utf8"));
(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
  await listen({ data: { type: 0, data: { config, docs, options: { suggest: true } } } });
  for (const words of JSON.parse(searches)) await listen({ data: { type: 2, data: words } });
  await new Promise((done) => setTimeout(done, 50));
  console.log(JSON.stringify(answers.filter((each) => each.type === 3).map((each) => {
    const [best] = each.data.items;
    return best ? best[0].location.split("#")[0] : null;
  })));
})();
"""


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site")
    (program,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    index = site / "search" / "search_index.json"
    command = ["node", "-e", SHIM, str(program), str(index), json.dumps(list(SEARCHES))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    wrong = [(words, page, at) for (words, page), at in zip(SEARCHES.items(), found, strict=True) if at != page]
    for words, page, at in wrong:
        print(f"{words!r}: {at} comes before {page}")
    print(f"{len(SEARCHES) - len(wrong)} of {len(SEARCHES)} searches find their page first")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
