"""A socket throughput probe: bytes a second that really arrive between two hosts of a lab.

Run as a script in the hosts: ``rate_probe.py receive ADDRESS PORT FLOWS SKIP_S SECONDS`` prints one JSON
line; ``rate_probe.py send ADDRESS PORT FLOWS`` sends until the other side closes.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import threading
import time

_CHUNK = 1 << 20
_CONNECT_S = 10.0


def receive(address: str, port: int, flows: int, skip_s: float, seconds: float) -> dict[str, float]:
    """Accepts ``flows`` connections and counts what arrives after the first ``skip_s`` seconds.

    The skipped part holds TCP's slow start and the bucket of tokens that a link at rest has saved up.

    Returns:
        ``bytes`` counted and the ``seconds`` they took.
    """
    buffer = bytearray(_CHUNK)
    with socket.create_server((address, port)) as server, selectors.DefaultSelector() as selector:
        server.settimeout(_CONNECT_S)
        print("listening", flush=True)
        for _ in range(flows):
            connection, _ = server.accept()
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
        begin = time.monotonic() + skip_s
        counted, first, last = 0, 0.0, 0.0
        while (now := time.monotonic()) < begin + seconds:
            for key, _ in selector.select(timeout=1.0):
                assert isinstance(key.fileobj, socket.socket)
                got = key.fileobj.recv_into(buffer)
                if got == 0:
                    raise ConnectionError("rate probe: the sender closed before the time was up")
                now = time.monotonic()
                if first:
                    counted, last = counted + got, now
                elif now >= begin:
                    first = last = now  # what came with this read belongs to the time before
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return {"bytes": float(counted), "seconds": last - first}


def send(address: str, port: int, flows: int) -> None:
    """Sends over ``flows`` connections until the receiver closes them."""
    payload = bytes(_CHUNK)

    def pump() -> None:
        with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
            try:
                while True:
                    connection.sendall(payload)
            except OSError:
                pass  # closed by the receiver: the measurement is over

    threads = [threading.Thread(target=pump) for _ in range(flows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(json.dumps(receive(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *map(float, sys.argv[5:7]))))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
