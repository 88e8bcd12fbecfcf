"""Where compiled graphs are kept, so that later processes need not compile them.

Neuron's compiler has a cache of its own, which is set by environment variables and may be in S3. Other devices use
torch_xla's: one file per graph, named by a hash of the graph and of what it is compiled with. Ranks do not share its
folder, because an executable may belong to one device, and a file is not written in one step. torch.compile's inductor
has a cache of its own, which ranks share.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from stepmark.errors import UsageError
from stepmark.filesystem.cache_folder import GRAPHS, cache_root
from stepmark.launch.world import World
from stepmark.runtime.base import Runtime
from stepmark.runtime.hardware import neuron_device_present
from stepmark.runtime.xla_environment import XLA_FOLDER, extracting_graphs

Setting = bool | str | None  # of the field: off, on in the default folder, a folder or URL; None: on where it helps

NEURON_FLAGS = "NEURON_CC_FLAGS"
NEURON_URL = "NEURON_COMPILE_CACHE_URL"
NEURON_FOLDER = "neuron"
INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # also the name of the folder's variable
_NO_CACHE = "--no_cache"
_NEURON_OPTION = re.compile(r"--cache_dir[= ](\S+)")

logger = logging.getLogger("stepmark")


def prepare_compile_cache(setting: Setting) -> None:
    """Points Neuron's compiler to its cache, before the device is opened. No-op elsewhere. Raises as `neuron_place`."""
    if not neuron_device_present():
        return
    flags = os.environ.get(NEURON_FLAGS, "")
    place = neuron_place(setting)
    if place is None:
        os.environ[NEURON_FLAGS] = flags if _NO_CACHE in flags.split() else f"{flags} {_NO_CACHE}".strip()
    elif _NEURON_OPTION.search(flags) is None:
        os.environ[NEURON_URL] = place


def neuron_place(setting: Setting) -> str | None:
    """The folder or URL where Neuron's compiler will keep graphs; None if the setting disables the cache. Raises
    UsageError if the setting contradicts `--cache_dir` in `NEURON_CC_FLAGS`, which Neuron's compiler prefers."""
    given = _NEURON_OPTION.search(os.environ.get(NEURON_FLAGS, ""))
    if setting is False:
        return None
    place = _place(setting) if isinstance(setting, str) else str(cache_root() / GRAPHS / NEURON_FOLDER)
    if given is None:
        return os.environ.get(NEURON_URL, place) if setting is None else place
    if isinstance(setting, str) and given.group(1) not in (setting, place):
        raise UsageError(
            f"compile_cache and {NEURON_FLAGS}: they name {setting} and {given.group(1)}; leave one of them out"
        )
    return given.group(1)


def _place(setting: str) -> str:
    """The absolute folder that a setting names, or the URL as it is."""
    return setting if "://" in setting else str(Path(setting).expanduser().absolute())


def without_cache_folder(flags: str) -> str:
    """The flags of Neuron's compiler without `--cache_dir`."""
    return _NEURON_OPTION.sub("", flags).strip()


def kept_in() -> str | None:
    """The folder or URL of all ranks' compiled graphs on a lazy device, once the cache is open; None without one."""
    if neuron_device_present():
        flags = os.environ.get(NEURON_FLAGS, "")
        if _NO_CACHE in flags.split():
            return None
        given = _NEURON_OPTION.search(flags)
        return given.group(1) if given else os.environ.get(NEURON_URL)
    folder = os.environ.get(XLA_FOLDER)
    return None if folder is None else str(Path(folder).parent)


def switched_on(setting: Setting) -> Setting:
    """The setting, with the default folder instead of no cache, unless the setting or a variable chooses otherwise."""
    given = setting is not None or neuron_device_present() or XLA_FOLDER in os.environ
    return setting if given else True


def open_compile_cache(runtime: Runtime, setting: Setting, world: World, *, compiles: bool = False) -> None:
    """Makes torch_xla keep this rank's compiled graphs; on Neuron, whose compiler keeps them itself, counts cache hits.
    Call it before the device has run anything. No-op while graphs are only extracted, which Neuron's tool compiles, and
    on eager devices, unless torch.compile `compiles`: then inductor keeps its graphs there.

    By default the cache is on, except on XLA's CPU client, which writes compiled graphs and cannot read them back.
    Raises UsageError where the folder cannot be written to, or is a URL.
    """
    if not runtime.lazy and compiles:
        _keep_inductors_graphs(setting)
    if not runtime.lazy or setting is False or extracting_graphs():
        return
    if neuron_device_present():
        _count_lookups(runtime)
        return
    if setting is None and (runtime.host_memory or XLA_FOLDER in os.environ):
        return
    from stepmark.runtime.xla import keep_graphs, versioned_name

    folder = _folder(setting, f"{versioned_name()}/rank-{world.rank}-of-{world.size}")
    if not keep_graphs(folder):
        logger.warning("compile_cache: the device has run graphs already, so none are kept in %s", folder)


def _folder(setting: Setting, name: str) -> Path:
    """The folder `name` of the cache, which is made. Raises UsageError as `open_compile_cache`."""
    if isinstance(setting, str) and "://" in setting:
        raise UsageError(f"compile_cache: {setting} is a URL, which only Neuron's compiler supports; name a folder")
    folder = (Path(_place(setting)) if isinstance(setting, str) else (cache_root() / GRAPHS).absolute()) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"compile_cache: cannot write to {folder}: {error.strerror}; name another folder") from error
    return folder


def _keep_inductors_graphs(setting: Setting) -> None:
    """A variable that was set counts, unless the setting names a folder; inductor reads and sets it as it compiles."""
    import torch
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    inductor.force_disable_caches = setting is False
    usual = os.environ.get(INDUCTOR_FOLDER) in (None, default_cache_dir())
    if isinstance(setting, str) or (setting is not False and usual):
        os.environ[INDUCTOR_FOLDER] = str(_folder(setting, f"inductor-{torch.__version__}"))


def _count_lookups(runtime: Runtime) -> None:
    """Counts the graphs that Neuron's compiler finds in its cache, if that is on a file system."""
    folder = kept_in()
    if folder is None or "://" in folder or not _runs_on_neuron(runtime):
        return
    from stepmark.runtime.xla import XlaRuntime

    assert isinstance(runtime, XlaRuntime)
    runtime.count_in_neuron_cache(Path(folder))


def _runs_on_neuron(runtime: Runtime) -> bool:
    """Whether this process computes on the machine's Neuron device, not on the CPU because of `PJRT_DEVICE=CPU`."""
    return not runtime.host_memory
