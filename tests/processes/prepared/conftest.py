"""A small fake vLLM, and its bootstrap started as the keeper starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes.prepared_process import Prepared
from vllm_launchers.prepared.command import BOOTSTRAP

MODULES = {
    "torch/__init__.py": "from torch import cuda, version\n",
    "torch/version.py": "import os\ncuda = os.environ.get('FAKE_CUDA')\nhip = None\n",
    "torch/cuda.py": """
_initialized = False
def _lazy_init():
    global _initialized
    _initialized = True
def is_initialized():
    return _initialized
""",
    "vllm/__init__.py": "import torch\n__version__ = '0.99.0'\n",
    "vllm/logger.py": """
import functools
@functools.lru_cache
def info_once(text):
    print(text, flush=True)
""",
    "vllm/platforms/__init__.py": """
import os
class current_platform:
    device_type = os.environ.get('FAKE_DEVICE', 'cpu')
""",
    "vllm/usage/__init__.py": "",
    "vllm/usage/usage_lib.py": "class UsageContext:\n    OPENAI_API_SERVER = 'server'\n",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
import os
import torch
from vllm.logger import info_once
class ValidationError(ValueError):
    title = 'SchedulerConfig'
    def errors(self, include_input=True):
        assert not include_input
        return [
            {'loc': ('max_num_seqs',), 'msg': 'Input should be greater than or equal to 1', 'type': 'x'},
            {'loc': (), 'msg': 'Value error, too long for the model', 'type': 'x'},
        ]
class OutOfMemoryError(RuntimeError):
    __module__ = 'torch'
def use_gpu():
    try:
        torch.cuda._lazy_init()
    except Exception:
        raise ValueError('no GPU')
KINDS = {
    'validation': ValidationError('input_value=s3cret'), 'value': ValueError('the value is wrong'),
    'type': TypeError('--this requires --that'), 'key': KeyError('head_dim'), 'long': ValueError('x' * 20_000),
    'package': ImportError('pip install fast-loader to use this'),
    'missing': ModuleNotFoundError("No module named 'vllm.gone'", name='vllm.gone'),
    'attribute': AttributeError('no such attribute'), 'busy': RuntimeError('CUDA error: device is busy'),
    'memory': OutOfMemoryError('no memory'), 'exit': SystemExit(1),
}
class Configuration:
    class parallel_config:
        worker_cls = os.environ.get('FAKE_WORKER', 'vllm.engine.worker.Worker')
        data_parallel_size = int(os.environ.get('FAKE_RANKS', '1'))
    class model_config:
        class hf_config:
            architectures = ['Fake']
class AsyncEngineArgs:
    @classmethod
    def from_cli_args(cls, args):
        made = cls()
        made.args = args
        return made
    if os.environ.get('FAKE_SIGNATURE'):
        def create_engine_config(self):
            pass
    else:
        def create_engine_config(self, usage_context, headless=False):
            assert usage_context == 'server'
            info_once('the model is ' + self.args.model)
            if self.args.gpu:
                use_gpu()
            if self.args.error:
                raise KINDS[self.args.error]
            return Configuration()
""",
    "vllm/engine/child.py": """
import ctypes
import os
import sys
def work():
    from vllm.engine import worker
    number = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    assert not number.value
    print('in the child', os.getppid(), os.environ.get('ADDED'), worker.IMPORTED_BY == sys.argv, flush=True)
    print(sorted(os.listdir('/proc/self/fd')), file=sys.stderr, flush=True)
    sys.exit(5)
""",
    "vllm/engine/worker.py": """
import os
import sys
import torch
IMPORTED_BY = list(sys.argv)
print('imported by', sys.argv[1:2], flush=True)
if os.environ.get('FAKE_CUDA'):
    try:
        torch.cuda._lazy_init()
    except Exception:
        pass
""",
    "vllm/engine/hangs.py": "import time\nprint('spare hangs', flush=True)\ntime.sleep(600)\n",
    "vllm/engine/late.py": "import os\nprint('spare is late', flush=True)\nopen(os.environ['FAKE_GATE']).read()\n",
    "vllm/third_party/__init__.py": "",
    "vllm/third_party/pynvml.py": """
import os
from pathlib import Path
from types import SimpleNamespace
opened = 0
def nvmlInit():
    global opened
    opened += 1
def nvmlShutdown():
    global opened
    opened -= 1
def nvmlDeviceGetCount():
    assert opened
    return 2
def nvmlDeviceGetHandleByIndex(index):
    return index
def nvmlDeviceGetComputeRunningProcesses(handle):
    listed = Path(os.environ['FAKE_HOLDERS']).read_text().splitlines()
    return [SimpleNamespace(pid=int(pid)) for pid in listed[handle].split()]
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/models/__init__.py": "",
    "vllm/model_executor/models/registry.py": "class ModelRegistry:\n    models = {}\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/main.py": """
import argparse
import importlib.metadata
import os
import sys
import time
if os.environ.get('FAKE_IMPORT') == 'hangs':
    print('hangs', flush=True)
    time.sleep(600)
if os.environ.get('FAKE_IMPORT') == 'exits':
    sys.exit('no server here')
if os.environ.get('FAKE_IMPORT') == 'fails':
    import vllm.gone
def main():
    import vllm.entrypoints.cli.serve
    os.environ.setdefault('VLLM_WORKER_MULTIPROC_METHOD', 'spawn')
    parser = argparse.ArgumentParser(prog='vllm')
    subparsers = parser.add_subparsers(dest='subparser')
    for command in vllm.entrypoints.cli.serve.cmd_init():
        command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    args = parser.parse_args()
    command.validate(args)
    args.dispatch_function(args)
    return 7
""",
    "vllm/entrypoints/cli/serve.py": """
import ctypes
import json
import multiprocessing
import os
import signal
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
def zombies():
    children = open(f'/proc/self/task/{os.getpid()}/children').read().split()
    return [child for child in children if open(f'/proc/{child}/stat').read().rpartition(') ')[2][0] == 'Z']
class ServeSubcommand:
    name = 'serve'
    @staticmethod
    def cmd(args):
        args.model = args.model_tag
        AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context='server')
        number = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))
        print(json.dumps({
            'argv': sys.argv, 'path': sys.path[0], 'death_signal': number.value, 'port': args.port,
            'descriptors': sorted(os.listdir('/proc/self/fd')), 'method': os.environ['VLLM_WORKER_MULTIPROC_METHOD'],
            'sigint': signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        }), flush=True)
        if args.spawn:
            from vllm.engine.child import work
            os.environ.update(json.loads(os.environ.pop('FAKE_ADDED', '{}')))
            for _ in range(int(args.spawn)):
                process = multiprocessing.get_context('spawn').Process(target=work)
                process.start()
                process.join()
                print('ended with', process.exitcode, *zombies(), flush=True)
    def validate(self, args):
        if args.auto:
            raise TypeError('Error: --auto requires --parser')
    def subparser_init(self, subparsers):
        parser = subparsers.add_parser('serve')
        parser.add_argument('model_tag')
        parser.add_argument('--model', default='default')
        parser.add_argument('--port', type=int, default=8000)
        parser.add_argument('--error', default='')
        parser.add_argument('--spawn', default=0)
        for flag in ('--gpu', '--auto'):
            parser.add_argument(flag, action='store_true')
        return parser
def cmd_init():
    if os.environ.get('FAKE_LAYOUT') == 'copied':
        return [type('Other', (ServeSubcommand,), {'cmd': staticmethod(lambda args: print('SERVES'))})()]
    return [ServeSubcommand()]
if os.environ.get('FAKE_LAYOUT') == 'renamed':
    Serve = ServeSubcommand
    del ServeSubcommand
""",
}

Start = Callable[..., Prepared]


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def start(fake_vllm: Path, tmp_path: Path) -> Iterator[Start]:
    """Start the bootstrap with the fake vLLM: ``start(*words, script=…, bootstrap=…, **environment)``."""
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.touch()
    begun: list[Prepared] = []

    def begin(*words: str, script: str = str(script), bootstrap: Path = BOOTSTRAP, **more: str) -> Prepared:
        environment = {"PATH": os.defpath, "PYTHONPATH": str(fake_vllm), **more}
        argv = [sys.executable, str(bootstrap), script, *(words or ("serve", "m"))]
        begun.append(Prepared(argv, environment, tmp_path))
        return begun[-1]

    yield begin
    for prepared in begun:
        prepared.end()
