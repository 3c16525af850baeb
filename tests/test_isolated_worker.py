"""The process with limits: what its parent notices, and when it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import psutil
import pytest
from support.runs.waiting import has_ended, wait_until

from appliance.isolated_worker import IsolatedWorker, Packet, WorkerEndedError, Workers
from appliance.tokenizer.isolation import encoder_task, template_task

SOURCE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SETUP: dict[str, Any] = {"source": SOURCE, "variables": {}, "tool_source": None}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def new_worker() -> IsolatedWorker:
    return IsolatedWorker(template_task, SETUP, cpu_seconds=5.0, memory_bytes=1 << 30)


def test_a_process_that_is_killed_or_stopped_is_noticed() -> None:
    worker = new_worker()
    assert worker.ask(Packet(HELLO), cpu_seconds=1.0) == Packet({"text": "hello"})
    worker.process.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerEndedError):
        worker.ask(Packet(HELLO), cpu_seconds=1.0)
    worker.kill()
    worker = new_worker()
    worker.process.send_signal(signal.SIGSTOP)
    with pytest.raises(WorkerEndedError, match="timed out"):
        worker.ask(Packet(HELLO), cpu_seconds=0.01)
    worker.kill()


PARENT = """
import json, sys, time
from appliance.isolated_worker import IsolatedWorker
from appliance.tokenizer.isolation import template_task
setup = json.loads(sys.argv[1])
worker = IsolatedWorker(template_task, setup, cpu_seconds=5.0, memory_bytes=1 << 30)
print(worker.process.pid, flush=True)
time.sleep(100)
"""


def test_a_process_ends_with_the_one_that_started_it() -> None:
    command = [sys.executable, "-c", PARENT, json.dumps(SETUP)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert not has_ended(worker)
        parent.kill()
    wait_until(lambda: has_ended(worker))


def test_what_cannot_be_set_up_is_no_worker() -> None:
    arguments = {"folder": "/nowhere", "separator": "x"}
    workers = Workers(encoder_task, arguments, cpu_seconds=5.0, memory_bytes=1 << 30, most=1)
    for _ in range(2):  # and the next one is served
        with pytest.raises(WorkerEndedError):
            workers.ask({}, cpu_seconds=1.0)


def new_workers(source: str) -> Workers:
    setup = {**SETUP, "source": source}
    return Workers(template_task, setup, cpu_seconds=5.0, memory_bytes=1 << 30, most=2)


@pytest.mark.parametrize("is_over", [True, False], ids=["long before", "at that moment"])
def test_an_idle_process_that_is_killed_costs_no_request(is_over: bool) -> None:
    earlier = {*psutil.Process().children()}
    workers = new_workers(SOURCE)
    answer = workers.ask(HELLO, cpu_seconds=1.0)
    for _ in range(3):
        (worker,) = {*psutil.Process().children()} - earlier
        worker.suspend()
        worker.kill()
        if is_over:
            wait_until(partial(has_ended, worker))
        assert workers.ask(HELLO, cpu_seconds=1.0) == answer
    assert workers.started == 4
    workers.close()


def test_a_process_that_is_killed_at_work_ends_its_request() -> None:
    """What it did may have killed it, and would kill the next one."""
    earlier = {*psutil.Process().children()}
    long = "{% for i in range(90000) %}{% set x = ('a' * 60000) | replace('a', 'aa') %}{% endfor %}"
    workers = new_workers("{% if messages %}" + long + "{% endif %}")
    nothing: dict[str, Any] = {"messages": []}
    assert workers.ask(nothing, cpu_seconds=1.0) == Packet({"text": ""})
    (worker,) = {*psutil.Process().children()} - earlier
    before = worker.cpu_times().user

    def kill_at_work() -> None:
        wait_until(lambda: worker.cpu_times().user > before + 0.1)
        worker.kill()

    killer = threading.Thread(target=kill_at_work)
    killer.start()
    with pytest.raises(WorkerEndedError, match="code -9"):
        workers.ask(HELLO, cpu_seconds=60.0)
    killer.join()
    assert workers.started == 1
    assert workers.ask(nothing, cpu_seconds=1.0) == Packet({"text": ""})
    workers.close()
