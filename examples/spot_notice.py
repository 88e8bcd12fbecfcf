"""Runs a command on an AWS spot instance, and sends it SIGTERM once the instance's end is announced.

    python examples/spot_notice.py stepmark train recipe.yaml --nproc 2

AWS sends no signal: two minutes before, its metadata service has a notice, for which this asks every five seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from urllib.request import ProxyHandler, Request, build_opener

SERVICE = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
EVERY = 5.0  # seconds, as AWS recommends
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # what a scheduler or a terminal may send


def ask(path: str, method: str, name: str, value: str) -> str:
    """The answer to a request with one header. Raises OSError where there is none."""
    request = Request(f"{SERVICE}/latest/{path}", method=method, headers={f"X-aws-ec2-metadata-token{name}": value})
    with build_opener(ProxyHandler({})).open(request, timeout=2) as answer:
        return str(answer.read().decode())


def notice() -> str | None:
    """What is announced; None while nothing is (404), or while the service does not answer."""
    try:
        token = ask("api/token", "PUT", "-ttl-seconds", "60")
        return ask("meta-data/spot/instance-action", "GET", "", token)
    except OSError:
        return None


def main(command: Sequence[str]) -> int:
    """The command's exit code: 75 where it was interrupted, and is to be started again on the next instance."""
    run = subprocess.Popen(command, start_new_session=True)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: run.send_signal(number))
    while run.poll() is None:
        if (announced := notice()) is not None:
            print(f"spot notice: {announced}", file=sys.stderr, flush=True)
            run.terminate()
            break
        try:
            run.wait(EVERY)
        except subprocess.TimeoutExpired:
            continue
    code = run.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
