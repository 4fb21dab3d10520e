"""Several hosts with rate-limited links on one machine, by network namespaces.

``NetLab(hosts=4, rate="1gbit")`` is a switch (a bridge in a namespace) with one host (a namespace) at the end
of each link (a veth pair). Both ends of a link are limited by a token bucket (``tbf``), so sending and receiving
are each held to the rate, as on a full-duplex wire. Every device lives in a namespace of the lab: the machine's
own network is neither seen nor touched, the addresses (10.213.0.0/16) can clash with nothing, and removing
the namespaces removes everything.

The rate is that of the wire: frames of 9,000 bytes leave 99.3 % of it to TCP's payload. Delay is not emulated.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.net import rate_probe, reaper

_MTU = 9000
# Of all kernels, and allowed in any namespace. What machines have otherwise differs: with BBR transfers stood still for
# some 40 ms every few seconds, without a packet lost.
_CONGESTION_CONTROL = "reno"
# Shorter queues cost TCP its rate when several hosts send to one; longer ones put control messages behind them.
_QUEUE_MS = 20.0
# Saved-up tokens make up for a late timer. Below one offloaded 64 KiB packet, tbf would cut packets up itself.
_BURST_MS = 1.0
_MIN_BURST = 80_000
_PROBE_PORT = 29400
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_serials = itertools.count()


class NetLabError(RuntimeError):
    """A lab could not be built, or was asked for something that it does not have."""


def parse_rate(rate: str) -> float:
    """Returns bits a second for ``"1gbit"``, ``"250mbit"``, ``"64kbit"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"netlab: rate {rate!r} is not a positive number with bit, kbit, mbit or gbit")
    return float(match[1]) * _UNITS[match[2]]


def missing() -> str | None:
    """Returns why this process cannot build a lab, or None when it can."""
    if os.geteuid() != 0:
        return "not root"
    absent = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetLabError(f"netlab: `{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")


def _limit(namespace: str, device: str, rate: str | None) -> None:
    if rate is None:
        return
    bits = parse_rate(rate)
    burst = max(_MIN_BURST, round(bits / 8 * _BURST_MS / 1e3))
    _call(
        *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
        *("rate", f"{bits:.0f}bit", "burst", f"{burst}b", "latency", f"{_QUEUE_MS:g}ms"),
    )


class NetLab:
    """A context manager: the lab stands inside the ``with`` block and is gone after it.

    It cleans up on the way out, on an exception, on SIGINT and SIGTERM (turned into SystemExit where nobody else
    handles it), at interpreter exit, and by its watchdog process after a SIGKILL.

    Args:
        hosts: Number of hosts, 1 to 200.
        rate: Rate of each host's link, both ways, as ``tc`` writes it; None leaves the links as fast as they are.
        racks: Number of switches; hosts are dealt to them in blocks. More than one is joined in a chain.
        interleaved: Hosts are dealt to the racks one at a time instead, as a scheduler may that knows none.
        uplink: Rate of the links between switches; default: ``rate``.
        fallback: Without root or the tools, whether to go on over loopback, with a printed notice, or to raise.
    """

    def __init__(
        self,
        hosts: int = 4,
        *,
        rate: str | None = "1gbit",
        racks: int = 1,
        interleaved: bool = False,
        uplink: str | None = None,
        fallback: bool = True,
    ) -> None:
        if not 1 <= hosts <= 200:
            raise ValueError(f"netlab: hosts must be 1 to 200, got {hosts}")
        if not 1 <= racks <= hosts:
            raise ValueError(f"netlab: racks must be 1 to hosts ({hosts}), got {racks}")
        self.hosts, self.rate, self.racks, self.uplink = hosts, rate, racks, uplink or rate
        self.interleaved = interleaved
        self.rate_bits = math.inf if rate is None else parse_rate(rate)
        if self.uplink is not None:
            parse_rate(self.uplink)
        reason = missing()
        if reason is not None and not fallback:
            raise NetLabError(f"netlab: no namespaces here ({reason}); run as root, with iproute2 and util-linux")
        self.emulated = reason is None
        self._reason = reason
        self._tag = ""
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._took_sigterm = False

    def __enter__(self) -> NetLab:
        if not self.emulated:
            print(f"netlab: NOTICE: {self._reason}: all ranks share loopback, without a rate limit", flush=True)
            return self
        reaper.remove_orphans()
        self._tag = reaper.tag_of(os.getpid(), next(_serials))
        self._watchdog = reaper.start_watchdog(self._tag)
        atexit.register(self.close)
        self._take_sigterm()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the lab and everything that runs in it; safe to call twice."""
        if not self._tag:
            return
        reaper.remove_tag(self._tag)
        self._tag = ""
        if self._watchdog is not None and self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
            self._watchdog.wait(timeout=30)
        if self._took_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._took_sigterm = False
        atexit.unregister(self.close)

    def _take_sigterm(self) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, exit_on_signal)
            self._took_sigterm = True

    def _build(self) -> None:
        switch = self._namespace("switch")
        _call("ip", "netns", "add", switch)
        for rack in range(self.racks):
            _call("ip", "-n", switch, "link", "add", f"br{rack}", "mtu", str(_MTU), "type", "bridge", "stp_state", "0")
            _call("ip", "-n", switch, "link", "set", f"br{rack}", "up")
        for rack in range(1, self.racks):
            ends = f"up{rack}", f"down{rack}"
            _call("ip", "-n", switch, "link", "add", ends[0], "mtu", str(_MTU), "type", "veth", "peer", "name", ends[1])
            for end, bridge in zip(ends, (rack - 1, rack), strict=True):
                _call("ip", "-n", switch, "link", "set", end, "mtu", str(_MTU), "master", f"br{bridge}", "up")
                _limit(switch, end, self.uplink)
        for host in range(self.hosts):
            self._build_host(host, switch)

    def _build_host(self, host: int, switch: str) -> None:
        name, port = self._namespace(f"h{host}"), f"port{host}"
        _call("ip", "netns", "add", name)
        # TCP would start a connection with what an earlier one learnt of the path: repeats must not depend on order.
        self._set_tcp(host, "tcp_no_metrics_save", "1")
        self._set_tcp(host, "tcp_congestion_control", _CONGESTION_CONTROL)
        _call(*("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch))
        _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", name, "addr", "add", f"{self.address(host)}/16", "dev", "eth0")
        _call("ip", "-n", name, "link", "set", "eth0", "mtu", str(_MTU), "up")
        _call("ip", "-n", switch, "link", "set", port, "mtu", str(_MTU), "master", f"br{self.rack(host)}", "up")
        _limit(name, "eth0", self.rate)
        _limit(switch, port, self.rate)

    def _set_tcp(self, host: int, name: str, value: str) -> None:
        self.run(host, ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}"], check=True)

    def namespace(self, host: int) -> str:
        """Returns the name of ``host``'s network namespace, for a process that enters it by itself."""
        return self._namespace(f"h{host}")

    def _namespace(self, part: str) -> str:
        if not self._tag:
            raise NetLabError("netlab: the lab is not open; use it in a with block")
        return f"{self._tag}-{part}"

    def rack(self, host: int) -> int:
        """Returns the switch that ``host`` hangs on."""
        return host % self.racks if self.interleaved else host * self.racks // self.hosts

    def address(self, host: int) -> str:
        """Returns the IPv4 address of ``host``, as the other hosts see it."""
        return f"10.213.{self.rack(host)}.{host + 1}" if self.emulated else "127.0.0.1"

    def environment(self, host: int) -> dict[str, str]:
        """Returns the variables by which c10d's store and Gloo use the lab's network, for a rank on ``host``."""
        device = "eth0" if self.emulated else "lo"
        return {"MASTER_ADDR": self.address(0), "GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": device}

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns ``command`` wrapped so that it runs in ``host``, under that host's name; the pid stays the same."""
        if not self.emulated:
            return list(command)
        # A host name of its own, so that code which groups ranks by host sees several hosts.
        rename = f'echo host{host} > /proc/sys/kernel/hostname; exec "$@"'
        inside = ["ip", "netns", "exec", self._namespace(f"h{host}"), "unshare", "--uts", "--"]
        return [*inside, "sh", "-c", rename, "sh", *command]

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts ``command`` in ``host``; ``options`` are those of ``subprocess.Popen``."""
        return subprocess.Popen(self.command(host, command), **options)

    def run(self, host: int, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs ``command`` in ``host`` to its end; ``options`` are those of ``subprocess.run``."""
        return subprocess.run(self.command(host, command), **options)

    def set_link(self, host: int, *, up: bool) -> None:
        """Pulls the cable of ``host``, or puts it in again."""
        _call("ip", "-n", self._namespace(f"h{host}"), "link", "set", "eth0", "up" if up else "down")

    def measure_rate(
        self, source: int = 0, target: int = 1, *, seconds: float = 1.0, skip_s: float = 0.3, flows: int = 1
    ) -> float:
        """Returns the bits of payload a second that TCP brings from host ``source`` to host ``target``.

        Args:
            source: Who sends.
            target: Who receives.
            seconds: Length of the measurement.
            skip_s: What is not counted at the beginning.
            flows: Number of connections at once.
        """
        script = [sys.executable, "-I", str(Path(rate_probe.__file__).resolve())]
        where = [self.address(target), str(_PROBE_PORT + next(_serials) % 100), str(flows)]
        receiver = self.popen(
            target, [*script, "receive", *where, str(skip_s), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        sender = None
        try:
            assert receiver.stdout is not None
            if receiver.stdout.readline().strip() != "listening":
                raise NetLabError("netlab: the rate probe's receiver did not start")
            sender = self.popen(source, [*script, "send", *where])
            line, _ = receiver.communicate(timeout=seconds + skip_s + 30)
            result: Mapping[str, float] = json.loads(line)
            return result["bytes"] * 8 / result["seconds"]
        finally:
            for process in (receiver, sender):
                if process is not None:
                    process.kill()
                    process.wait()

    def uplink_bytes(self) -> int:
        """Returns the bytes that have crossed the links between switches so far, headers included, both ways."""
        if not self.emulated:
            return 0
        done = subprocess.run(
            ["ip", "-n", self._namespace("switch"), "-s", "-j", "link", "show", "type", "veth"],
            capture_output=True,
            text=True,
            check=True,
        )
        ends = [link for link in json.loads(done.stdout) if link["ifname"].startswith(("up", "down"))]
        return sum(int(link["stats64"]["tx"]["bytes"]) for link in ends)

    def describe(self) -> dict[str, Any]:
        """Returns the lab's settings, for a results file."""
        if not self.emulated:
            return {"network": "loopback", "reason": self._reason}
        racks = {"racks": self.racks, "interleaved": self.interleaved, "uplink": self.uplink}
        switch = racks if self.racks > 1 else {}
        tcp = {"congestion_control": _CONGESTION_CONTROL}
        link = {"rate": self.rate, "mtu_bytes": _MTU, "queue_ms": _QUEUE_MS, **tcp}
        return {"network": "namespaces", "hosts": self.hosts, **link, **switch}


def exit_on_signal(number: int, _: types.FrameType | None) -> None:
    """A signal handler under which ``with`` and ``finally`` blocks still clean up."""
    raise SystemExit(128 + number)
