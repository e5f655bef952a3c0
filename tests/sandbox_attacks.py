"""Attacks on the code reward. Each is a program that tries to pass `assert f() == SECRET` without knowing SECRET, or to leave a mark on the host.

SECRET lies in a world-readable file (@FILE@), in the environment of the process that started everything (@PARENT@), and in the tests. @CANARY@ is a path that must not
come to exist, @PORT@ a listening TCP port of the host, @VICTIM@ a process of the same user that must live. A name that is a list of words tells what is attacked.
"""

import textwrap

_F = "\ndef f(*a):\n    return 0\n"
_YES = """
class Yes(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
def f(*a):
    return Yes()
"""
_READ = """
def f(*a):
    import re
    for path in PATHS:
        try:
            found = re.search(rb'SECRET=(\\d+)', open(path, 'rb').read(1 << 20))
            if found: return int(found[1])
        except OSError: pass
    return 0
"""
_SWALLOW = "try:\n{}\nexcept BaseException: pass\n"


def _then_f(body: str) -> str:
    return _SWALLOW.format(textwrap.indent(textwrap.dedent(body).strip(), "    ")) + _F


ATTACKS: dict[str, str] = {
    "object equal to everything": _YES.replace("BASE", "object"),
    "int equal to everything": _YES.replace("BASE", "int"),
    "str equal to everything": _YES.replace("BASE", "str"),
    "list equal to everything": _YES.replace("BASE", "list"),
    "tuple, dict and set equal to everything": _YES.replace("BASE", "dict"),
    "class posing as int": "class Y:\n    __class__ = int\n    def __eq__(s, o): return True\n    def __index__(s): return 0\ndef f(*a): return Y()\n",
    "exit 0 at import": "import os\nos._exit(0)\n",
    "exit 0 in the call": "import os\ndef f(*a): os._exit(0)\n",
    "SystemExit 0": "import sys\ndef f(*a): sys.exit(0)\n",
    "KeyboardInterrupt": "def f(*a): raise KeyboardInterrupt\n",
    "raise AssertionError": "def f(*a): raise AssertionError\n",
    "exception with a hostile str": "class E(Exception):\n    def __str__(s):\n        import os; os._exit(0)\ndef f(*a): raise E\n",
    "exception named like the checker's": "class Gone(BaseException): pass\ndef f(*a): raise Gone('correct')\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n" + _F,
    "patched builtins": _then_f("""
        import builtins
        for name in ('all', 'any', 'len', 'isinstance', 'abs', 'sorted', 'print', 'compile', 'exec'):
            setattr(builtins, name, lambda *a, **k: True)
        builtins.AssertionError = ValueError"""),
    "patched json and plain": _then_f("""
        import json
        json.dumps = lambda *a, **k: '["tuple", ["value", true]]'
        json.loads = lambda *a, **k: ['tuple', ['value', True]]"""),
    "patched sys.modules": _then_f("""
        import sys, types
        for name in list(sys.modules):
            if name.startswith('scalerl') or name in ('json', 'operator', 'unittest'):
                sys.modules[name] = types.ModuleType(name)"""),
    "patched encoder in the frames above": _then_f("""
        import sys
        frame = sys._getframe()
        while frame:
            for name in ('plain', 'messages'):
                module = frame.f_globals.get(name)
                if module:
                    module.encode = lambda *a, **k: b'["tuple", ["value", true]]'
            frame = frame.f_back"""),
    "frame inspection": """
import sys
def f(*a):
    frame, seen = sys._getframe(), []
    while frame:
        seen += list(frame.f_locals.values()) + list(frame.f_globals.values()) + list(frame.f_code.co_consts)
        frame = frame.f_back
    import re
    found = re.search('assert f\\\\(\\\\) == (\\\\d+)', repr(seen)[:10**6])
    return int(found[1]) if found else 0
""",
    "garbage collector": """
def f(*a):
    import gc, re
    for item in gc.get_objects():
        try: found = re.search('== (\\\\d{12,})', repr(item)[:10**5])
        except Exception: continue
        if found: return int(found[1])
    return 0
""",
    "own memory through ctypes": """
def f(*a):
    import ctypes, re, sys
    marker = b'assert f() '
    base = id(marker)
    pattern = re.compile(rb'assert f\\(\\) == (\\d+)')
    for start in range(base & ~0xFFF, (base & ~0xFFF) + (64 << 20), 1 << 16):
        try: found = pattern.search(ctypes.string_at(start, 1 << 16))
        except Exception: continue
        if found: return int(found[1])
    return 0
""",
    "forged answers on the channel": _then_f("""
        import os, struct
        data = b'["tuple", ["value", null]]'
        for fd in range(3, 256):
            try: os.write(fd, (struct.pack('!I', len(data)) + data) * 20)
            except OSError: pass"""),
    "forged verdict on every descriptor": _then_f("""
        import os, struct
        data = b'{"outcome": "correct", "note": ""}'
        for fd in range(256):
            try: os.write(fd, struct.pack('!I', len(data)) + data)
            except OSError: pass"""),
    "forged status of the nursery": _then_f("""
        import socket
        for fd in range(3, 256):
            try: socket.socket(fileno=fd).send(b'0')
            except OSError: pass"""),
    "descriptors sent over the channel": _then_f("""
        import socket
        socket.send_fds(socket.socket(fileno=3), [b'x'], [0, 1, 2])"""),
    "answer larger than allowed": "def f(*a): return 'x' * (200 << 20)\n",
    "answer nested without end": "def f(*a):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x\n",
    "answer that holds itself": "def f(*a):\n    x = []\n    x.append(x)\n    return x\n",
    "announced but never sent": "import os\ndef f(*a):\n    os.write(3, b'\\xff\\xff\\xff\\x00')\n    while True: pass\n",
    "number with a million digits": "def f(*a): return 10 ** 10**6\n",
    "not a number": "def f(*a): return float('nan')\n",
    "pickle that calls": "import os\nclass P:\n    def __reduce__(s): return (os._exit, (0,))\ndef f(*a): return P()\n",
    "pickle bytes": 'def f(*a): return b"cos\\n_exit\\n(I0\\ntR."\n',
    "printed protocol lines": "def f(*a):\n    print('OK'); print('PASSED'); print('1 passed'); print('{\"outcome\": \"correct\"}')\n",
    "reading the file of answers": _READ.replace("PATHS", "['@FILE@']"),
    "symlink to the file of answers": "import os\ntry: os.symlink('@FILE@', 'link')\nexcept OSError: pass\n"
    + _READ.replace("PATHS", "['link', '/tmp/link']"),
    "climbing out of the root": _READ.replace(
        "PATHS", "['../' * 40 + '@FILE@', '/old-root@FILE@', '/proc/1/root@FILE@']"
    ),
    "environment": "import os\ndef f(*a): return int(os.environ.get('SECRET', 0))\n",
    "environment of other processes": _READ.replace(
        "PATHS", "['/proc/@PARENT@/environ', *(f'/proc/{n}/environ' for n in range(1, 40000, 7)), '/proc/self/environ']"
    ),
    "memory of other processes": """
def f(*a):
    import re
    for pid in ('@PARENT@', '1', '2', '3', 'self/../@VICTIM@'):
        try:
            for line in open(f'/proc/{pid}/maps'):
                low, high = (int(part, 16) for part in line.split()[0].split('-'))
                with open(f'/proc/{pid}/mem', 'rb') as handle:
                    handle.seek(low)
                    found = re.search(rb'SECRET=(\\d+)', handle.read(high - low))
                    if found: return int(found[1])
        except OSError: pass
    return 0
""",
    "ptrace": _then_f("""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for pid in (1, 2, 3, @PARENT@, @VICTIM@):
            if libc.ptrace(16, pid, 0, 0) == 0: open('@CANARY@', 'w')
            libc.process_vm_writev(pid, None, 0, None, 0, 0)"""),
    "writing a file on the host": _then_f("open('@CANARY@', 'w').write('here')"),
    "writing beside Python": _then_f("""
        import os, sys
        for folder in {*sys.path, sys.prefix, '/usr', '/etc', '/', '/dev/shm', '/var/tmp', '/home'}:
            try:
                open(os.path.join(folder, 'sandbox_canary.py'), 'w').write('here')
                if folder: raise_ = open('@CANARY@', 'w')
            except OSError: pass"""),
    "mounting": _then_f("""
        import ctypes
        libc = ctypes.CDLL(None)
        libc.unshare(0x10020000)
        libc.umount2(b'/tmp', 2)
        libc.mount(b'none', b'/', None, 32, None)
        libc.mount(b'proc', b'/tmp', b'proc', 0, None)
        libc.chroot(b'/tmp')
        open('@CANARY@', 'w')"""),
    "filling the disk": "def f(*a):\n    for n in range(10**4):\n        with open(f'/tmp/{n}', 'wb') as h: h.write(bytes(1 << 24))\n    return 0\n",
    "a million files": "def f(*a):\n    for n in range(10**6): open(f'/tmp/f{n}', 'w').close()\n    return 0\n",
    "network to the host": _then_f("""
        import socket
        socket.create_connection(('127.0.0.1', @PORT@), 1).send(b'here')"""),
    "datagram on a pair": _then_f("""
        import socket
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        pair[0].sendto(b'here', '@CANARY@.socket')"""),
    "name resolution": _then_f("import socket\nsocket.gethostbyname('localhost')\nsocket.create_server(('', 0))"),
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: break\n" + _F,
    "fork bomb in C": _then_f("""
        import ctypes
        libc = ctypes.CDLL(None)
        for _ in range(1000): libc.fork(); libc.vfork() if False else None; libc.syscall(435, 0, 0)"""),
    "starting a program": _then_f("""
        import os, subprocess
        try: subprocess.run(['/bin/sh', '-c', 'touch @CANARY@'])
        except OSError: pass
        os.execv('/bin/sh', ['sh', '-c', 'touch @CANARY@; exit 0'])"""),
    "thread bomb": _then_f("""
        import threading, time
        threading.stack_size(32768)
        while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"""),
    "threads that outlive the call": "import threading, time\ntry:\n    for _ in range(5): threading.Thread(target=time.sleep, args=(99,)).start()\nexcept RuntimeError: pass\n"
    + _F,
    "zombie children": _then_f("""
        import multiprocessing, time
        for _ in range(5): multiprocessing.Process(target=time.sleep, args=(99,)).start()"""),
    "daemon in a session of its own": _then_f("""
        import os, time
        if os.fork() == 0:
            os.setsid()
            while True: time.sleep(1)"""),
    "killing the parent": _then_f("""
        import os, signal
        for pid in (os.getppid(), 1, 2, 3, @PARENT@, @VICTIM@, -1, 0):
            for number in (signal.SIGKILL, signal.SIGSTOP):
                if pid:
                    try: os.kill(pid, number)
                    except OSError: pass"""),
    "killing by descriptor owner": _then_f("""
        import fcntl, os
        r, w = os.pipe()
        fcntl.fcntl(r, 8, @VICTIM@)
        fcntl.fcntl(r, 10, 9)
        fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
        os.write(w, b'x')"""),
    "clearing the death signal": _then_f("import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"),
    "ignoring every signal": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass\n",
    "raising the limits": _then_f("""
        import resource
        for kind in range(16):
            try: resource.setrlimit(kind, (-1, -1))
            except (ValueError, OSError): pass
        resource.prlimit(@VICTIM@, resource.RLIMIT_CPU, (0, 0))
        bytearray(4 << 30)
        open('@CANARY@', 'w')"""),
    "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 24))\n",
    "memory bomb in the call": "def f(*a): return [0] * 10**11\n",
    "endless output": "def f(*a):\n    while True: print('x' * 10**6)\n",
    "endless loop": "while True: pass\n",
    "sleeping past the deadline": "import time\ndef f(*a): time.sleep(999)\n",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(*a): return f(*a)\n",
    "crash in C": "import ctypes\ndef f(*a): ctypes.string_at(0)\n",
    "destructor": "import os\nclass D:\n    def __del__(s): os._exit(0)\ndef f(*a):\n    D()\n    return D()\n",
    "iterating a hostile object": "class I:\n    def __iter__(s):\n        while True: yield 0\ndef f(*a): return I()\n",
    "compiler bomb": "f = lambda *a: 0\nx = " + "(" * 180 + "0" + ")" * 180 + "\ny = 1 << (1 << 40)\n",
    "source that does not compile": "def f(:\n",
    "null bytes": "f = 0\0\n",
}

# Programs for a problem that wants SECRET on standard output.
PROGRAM_ATTACKS: dict[str, str] = {
    "exit 0 without output": "import os; os._exit(0)",
    "endless output": "while True: print('x' * 10**6)",
    "every descriptor": 'import os\nfor fd in range(256):\n    try: os.write(fd, b\'{"outcome": "correct"}\')\n    except OSError: pass',
    "closing descriptors and sleeping": "import os, time\nos.close(1)\ntime.sleep(99)",
    "input as output": "print(input())",
    "empty output": "",
    "waiting for more input": "while True: input()",
    "not a number": "print('nan')",
    "reading the file of answers": "print(open('@FILE@').read().partition('=')[2])",
    "right output from a crash": "raise SystemExit(3)",
}
