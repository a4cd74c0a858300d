"""Cut one of two hosts off in the middle of an epoch, bring it back, and see what becomes of it.

    python -m benchmarks.network_drill [--epochs 80]

The hosts are two network namespaces of this machine, joined by a cable; each runs
``torchrun --nnodes=1:2``. Once the training is under way on both, the cable is pulled: the ranks
wait for each other until a collective times out, and the host of the rendezvous goes on alone, from
the newest checkpoint. Then the cable is put back, and the other host starts its torchrun anew: the
training stops, and goes on with both. The account at the end has to be that of a run that nobody
disturbed.

Needs root, Linux and iproute2. The addresses are those of the namespaces alone, and gone with them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks.crash_drill import ENVIRONMENT, PROGRAM, ROOT, compare
from benchmarks.drill_account import Attempt, DrillError, list_attempts, read_attempt, show
from benchmarks.drill_training import STEPS_PER_EPOCH

PATIENCE_S = 180.0
POLL_S = 0.02
COLLECTIVE_S = 6  # until one times out
STEP_S = 0.05  # so that the training lasts until the host is back
NUM_STEPS = 20  # that it takes at least before anything is changed
ADDRESSES = ("10.213.77.1", "10.213.77.2")
DEVICES = ("drill-a", "drill-b")
RENDEZVOUS = (
    *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=10", "--monitor-interval=0.1"),
    *("--rdzv-backend=c10d", "--rdzv-id=drill", f"--rdzv-endpoint={ADDRESSES[0]}:29400"),
)


class Hosts:
    """Two namespaces, the cable between them, and the training that runs on both."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder, self.epochs = folder, epochs
        self._names = [f"shardplug-drill-{os.getpid()}-{side}" for side in "ab"]
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._num_launches = 0
        folder.mkdir(parents=True)

    def set_up(self) -> None:
        """Make the namespaces, and join them."""
        for name in self._names:
            _ip("netns", "add", name)
        ends = ["name", DEVICES[1], "netns", self._names[1]]
        _ip("link", "add", DEVICES[0], "netns", self._names[0], "type", "veth", "peer", *ends)
        for name, device, address in zip(self._names, DEVICES, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for each in ("lo", device):
                _ip("-n", name, "link", "set", each, "up")

    def plug(self, state: str) -> None:
        """Pull the cable at the second host, "down", or put it back, "up"."""
        _ip("-n", self._names[1], "link", "set", DEVICES[1], state)

    def launch(self, host: int) -> None:
        """Start torchrun on a host."""
        # A host is gone when it has not been heard of for three seconds, and one that is alone
        # waits as long for others.
        conf = f"is_host={host == 0},last_call_timeout=3,keep_alive_interval=1,read_timeout=20"
        command = [
            *("ip", "netns", "exec", self._names[host], sys.executable),
            *("-m", "torch.distributed.run", *RENDEZVOUS),
            *(f"--rdzv-conf={conf}", f"--local-addr={ADDRESSES[host]}", *PROGRAM),
            *(str(self.folder), f"--epochs={self.epochs}"),
            *(f"--timeout-s={COLLECTIVE_S}", f"--step-s={STEP_S}"),
        ]
        self._num_launches += 1
        log = self.folder / f"torchrun-{self._num_launches}-{'ab'[host]}.log"
        with log.open("wb") as output:
            self._agents[host] = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": DEVICES[host]},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for_attempt(self, num_ranks: int, after: int) -> int:
        """Wait until an attempt on that many ranks is well under way, inside an epoch.

        Args:
            num_ranks: How many.
            after: Attempts that there had been before.

        Returns:
            How many there are now.
        """

        def is_under_way() -> bool:
            places = list_attempts(self.folder)[after:]
            attempt = read_attempt(places[-1]) if places else None
            return attempt is not None and len(attempt.pids) == num_ranks and _is_inside(attempt)

        self.wait(is_under_way, f"{num_ranks} ranks to train")
        return len(list_attempts(self.folder))

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for something, with patience that ends."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > deadline:
                logs = sorted(self.folder.glob("torchrun-*.log"))
                told = "\n".join(f"{log.name}:\n{log.read_text('utf-8')[-2000:]}" for log in logs)
                raise DrillError(f"Waited {PATIENCE_S:.0f} s for {what}.\n{told}")
            time.sleep(POLL_S)

    def wait_for_end(self) -> None:
        """Wait until torchrun has ended well on both hosts."""
        agents = self._agents.values()
        self.wait(lambda: all(each.poll() is not None for each in agents), "the end")
        codes = [each.returncode for each in agents]
        if any(codes):
            raise DrillError(f"torchrun ended with {codes}.")

    def end_host(self, host: int) -> None:
        """Kill all that runs on a host."""
        told = subprocess.run(
            ["ip", "netns", "pids", self._names[host]], capture_output=True, text=True, check=True
        )
        for pid in told.stdout.split():
            with suppress(ProcessLookupError):  # it may have just ended
                os.kill(int(pid), signal.SIGKILL)
        if host in self._agents:
            self._agents.pop(host).wait()

    def remove(self) -> None:
        """Take the namespaces away, with all that runs in them."""
        for host, name in enumerate(self._names):
            if Path("/run/netns", name).exists():
                self.end_host(host)
                _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _is_inside(attempt: Attempt) -> bool:
    """Tell whether an attempt has taken some steps and is not near the end of an epoch."""
    step = attempt.start + len(attempt.steps)
    return len(attempt.steps) >= NUM_STEPS and 2 <= step % STEPS_PER_EPOCH <= STEPS_PER_EPOCH - 3


def disturb(hosts: Hosts) -> None:
    """Train on both hosts, cut one off, bring it back, and train to the end."""
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {what}", flush=True)

    for host in (0, 1):
        hosts.launch(host)
    known = hosts.wait_for_attempt(2, after=0)
    say("both hosts train; the cable is pulled")
    hosts.plug("down")
    known = hosts.wait_for_attempt(1, after=known)
    say("one host trains alone; the cable is put back, and the other starts again")
    hosts.end_host(1)
    hosts.plug("up")
    hosts.launch(1)
    hosts.wait_for_attempt(2, after=known)
    say("both hosts train again")
    hosts.wait_for_end()
    say("the training has ended")


def main() -> None:
    """Disturb a training on two hosts, and print the account."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=80)
    epochs = parser.parse_args().epochs
    with tempfile.TemporaryDirectory(prefix="shardplug-drill-") as folder:
        hosts = Hosts(Path(folder) / "run", epochs)
        try:
            hosts.set_up()
            disturb(hosts)
        finally:
            hosts.remove()
        show(compare(hosts.folder, epochs=epochs), epochs=epochs)


if __name__ == "__main__":
    main()
