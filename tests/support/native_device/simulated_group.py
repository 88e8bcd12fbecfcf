"""A process group for a device whose memory no network library can read: every collective goes through the host and
gloo. Registered as the default backend of the simulated device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

BACKEND = "staged"


class _Staged(Work):
    """A transfer of the host's, and what is done with its results once somebody waits for it."""

    def __init__(self, work=None, after=lambda: None):
        super().__init__()
        self._work, self._after, self._over = work, after, False

    def wait(self, timeout=None):
        if not self._over:
            if self._work is not None:
                self._work.wait()
            self._after()
            self._over = True
        return True

    def is_completed(self):
        return self._over or self._work is None or self._work.is_completed()

    def synchronize(self):
        self.wait()

    def get_future(self):
        self.wait()
        future = torch.futures.Future()
        future.set_result(None)
        return future


def _on_host(tensor):
    return tensor if tensor.device.type == "cpu" else tensor.detach().cpu().contiguous()


def _for_host(tensor):
    return tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=tensor.dtype)


def _bring_back(tensors, received):
    for tensor, host in zip(tensors, received, strict=True):
        if tensor is not host:
            tensor.detach().copy_(host)


class HostStaged(ProcessGroup):
    """CPU tensors go to gloo as they are."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout)

    def _in_place(self, call, tensors):
        tensors = [tensors] if torch.is_tensor(tensors) else tensors
        hosts = [_on_host(each) for each in tensors]
        return _Staged(call(hosts), lambda: _bring_back(tensors, hosts))

    def _between(self, call, output, input, *more):
        sent = _on_host(input)
        if output.device.type != "cpu" or sent.data_ptr() == output.data_ptr():
            sent = sent.clone()  # an input may be a part of the output
        received = _for_host(output)
        return _Staged(call(received, sent, *more), lambda: (sent, _bring_back([output], [received])))

    def allreduce(self, tensors, opts=None):
        if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            op, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = op
        opts = opts or dist.AllreduceOptions()
        return self._in_place(lambda hosts: self._gloo.allreduce(hosts, opts), tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._in_place(lambda hosts: self._gloo.allreduce_coalesced(hosts, opts), tensors)

    def broadcast(self, tensors, opts):
        return self._in_place(lambda hosts: self._gloo.broadcast(hosts, opts), tensors)

    def reduce(self, tensors, opts):
        return self._in_place(lambda hosts: self._gloo.reduce(hosts, opts), tensors)

    def allgather(self, outputs, inputs, opts=None):
        sent, received = [_on_host(each) for each in inputs], [[_for_host(each) for each in row] for row in outputs]
        return _Staged(self._gloo.allgather(received, sent), lambda: self._rows_back(outputs, received))

    def gather(self, outputs, inputs, opts):
        sent, received = [_on_host(each) for each in inputs], [[_for_host(each) for each in row] for row in outputs]
        return _Staged(self._gloo.gather(received, sent, opts), lambda: self._rows_back(outputs, received))

    @staticmethod
    def _rows_back(outputs, received):
        for row, hosts in zip(outputs, received, strict=True):
            _bring_back(row, hosts)

    def scatter(self, outputs, inputs, opts):
        sent, received = [[_on_host(each) for each in row] for row in inputs], [_for_host(each) for each in outputs]
        return _Staged(self._gloo.scatter(received, sent, opts), lambda: _bring_back(outputs, received))

    def _allgather_base(self, output, input, opts=None):
        return self._between(self._gloo._allgather_base, output, input)

    def _reduce_scatter_base(self, output, input, opts=None):
        return self._between(self._gloo._reduce_scatter_base, output, input, opts or dist.ReduceScatterOptions())

    def alltoall_base(self, output, input, output_splits, input_splits, opts=None):
        call = self._gloo.alltoall_base
        return self._between(call, output, input, output_splits, input_splits, opts or dist.AllToAllOptions())

    # What torch 2.13 calls them.
    all_gather_single = allgather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_single = alltoall_base

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        works = [self._allgather_base(*each) for each in zip(outputs, inputs, strict=True)]
        return _Staged(None, lambda: [work.wait() for work in works])

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        works = [self._reduce_scatter_base(*each, opts) for each in zip(outputs, inputs, strict=True)]
        return _Staged(None, lambda: [work.wait() for work in works])

    def send(self, tensors, dst, tag=0):
        sent = [_on_host(each).contiguous() for each in tensors]
        return _Staged(self._gloo.send(sent, dst, tag), lambda: sent)

    def recv(self, tensors, src, tag=0):
        received = [_for_host(each) for each in tensors]
        return _Staged(self._gloo.recv(received, src, tag), lambda: _bring_back(tensors, received))

    def recv_anysource(self, tensors, tag=0):
        received = [_for_host(each) for each in tensors]
        return _Staged(self._gloo.recv_anysource(received, tag), lambda: _bring_back(tensors, received))

    def barrier(self, opts=None):
        return self._gloo.barrier()

    def setGroupName(self, name):  # a DeviceMesh asks for it, and torch keeps none of a group that is written in Python
        self._name = name

    def getGroupName(self):
        return self._name

    def getBackendName(self):
        return BACKEND

    def _get_backend(self, device):  # torch 2.14 asks it for tensors of the host, too
        return self

    def rank(self):
        return self._gloo.rank()

    def size(self):
        return self._gloo.size()


def register(device):
    """Makes it the default backend of the device."""
    dist.Backend.register_backend(BACKEND, HostStaged, devices=[device])
