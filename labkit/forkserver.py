"""The fork server: one small single-threaded process that has pika loaded and forks workers in milliseconds.

It is exec'd by the kernel (`python -m labkit.forkserver FD PID MODULE`), is told the broker's address once, then takes one
request a byte over a socket, reaps every worker and reports its exit status, kills what a dead worker left in its
process group, and ends, with all workers, as soon as the kernel is gone.
"""

import ctypes
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys

from labkit import link, topology, worker

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def main() -> None:
    """Serves until the kernel's end of the socket closes, or the kernel itself ends."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    kernel = int(sys.argv[2])
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)      # an interrupted cell is the kernel's to handle
    wake, wake_write = socket.socketpair()
    wake_write.setblocking(False)
    signal.set_wakeup_fd(wake_write.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    importlib.import_module(sys.argv[3])
    _warm_up(requests)
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        watch = _watch(kernel, selector)
        workers: dict[int, int] = {}                  # pid -> where its end is reported
        while True:
            for key, _ in selector.select():
                if key.fileobj is requests:
                    order, fds, *_ = socket.recv_fds(requests, 1, 4)
                    if not order:
                        return _end(workers)
                    _spawn(fds, workers, requests, wake, wake_write)
                elif key.fileobj is wake:
                    wake.recv(4096)
                    _reap(workers)
                elif key.fileobj is watch:
                    return _end(workers)


def _warm_up(requests: socket.socket) -> None:
    """Connects once, so that what pika makes at its first connection is made here and shared by every worker."""
    address = link.receive_one(requests)
    try:
        topology.connect(address).close()
    except Exception:
        pass                                          # a worker will tell it where it can be told
    gc.collect()
    gc.freeze()                                       # so that a collection in a worker does not copy shared pages
    gc.disable()                                      # until the worker has its job


def _spawn(fds: list[int], workers: dict[int, int], *mine: socket.socket) -> None:
    line, trace, output, status = fds
    parent = os.getpid()
    pid = os.fork()
    if pid:
        workers[pid] = status
        os.write(status, f"{pid}\n".encode())
        for fd in (line, trace, output):
            os.close(fd)
        return
    try:
        os.setsid()
        if _libc:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for fd in (int(name) for name in os.listdir("/dev/fd")):
            if fd > 2 and fd not in (line, trace):
                try:
                    os.close(fd)
                except OSError:
                    pass                              # the listing's own descriptor
        worker.main(line, trace)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _reap(workers: dict[int, int]) -> None:
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _kill_group(pid)
        report = workers.pop(pid)
        try:
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        except BrokenPipeError:
            pass                                      # the run that wanted to know is over
        os.close(report)


def _end(workers: dict[int, int]) -> None:
    signal.set_wakeup_fd(-1)
    for pid in workers:
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass                                          # nobody is left in it


def _watch(pid: int, selector: selectors.BaseSelector):
    """Makes the selector wake when the process ends; the socket alone may be held open by a child of the kernel."""
    if hasattr(os, "pidfd_open"):
        watch = os.pidfd_open(pid)
    else:
        watch = select.kqueue()
        watch.control([select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)], 0)
    selector.register(watch, selectors.EVENT_READ)
    return watch


if __name__ == "__main__":
    main()
