"""`python -m tests.lessons 4 5` runs two lessons and stores them with what they print and draw; without a number, all.

Pictures are stored in few colours, which makes them four times smaller."""

import base64
import gc
import io
import os
import sys
from multiprocessing import get_context
from pathlib import Path

import matplotlib
import nbformat
from ipykernel.kernelapp import IPKernelApp
from jupyter_client import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner
from nbclient import NotebookClient
from PIL import Image

COLOURS = 256

# Runs in front of a lesson: plt.show() refuses an axis that has numbers and no name.
AXES_HAVE_NAMES = """
import matplotlib.pyplot as plt

def is_number(text):
    return "$" in text or text.strip("-\N{MINUS SIGN}%").replace(".", "").isdecimal()

def checked(*args, show=plt.show, **kwargs):
    for number in plt.get_fignums():
        for axes in plt.figure(number).axes:
            for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
                texts = [label.get_text() for label in axis.get_ticklabels() if label.get_visible()]
                if any(map(is_number, texts)) and not axis.get_label_text():
                    raise AssertionError(f"the {axis.axis_name} axis of '{axes.get_title()}' has no name: {texts}")
    return show(*args, **kwargs)

plt.show = checked
"""


# Each lesson has a process of its own, forked from one that has imported what most of them begin with.
_PROCESSES = get_context("forkserver")
_IMPORTED = ["torch", "matplotlib.pyplot", "sklearn.datasets", "ipykernel.kernelapp", "invfunc.testing"]


def start_kernel(arguments, folder):
    gc.freeze()  # what a look at garbage touches would be copied, at each `peak_memory`
    os.chdir(folder)
    matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"  # as where the kernel imports it
    IPKernelApp.launch_instance(argv=arguments)


class Kernel(_PROCESSES.Process):
    """With the names that `subprocess.Popen` has, which jupyter uses."""

    stdin = stdout = stderr = None

    def poll(self):
        return self.exitcode

    def wait(self):
        self.join()
        return self.exitcode

    def send_signal(self, signal):
        os.kill(self.pid, signal)


class Forked(LocalProvisioner):
    """Starts a kernel in a process of that one."""

    async def launch_kernel(self, cmd, **options):
        _PROCESSES.set_forkserver_preload(_IMPORTED)
        self.process = Kernel(target=start_kernel, args=(cmd[cmd.index("-f") :], options["cwd"]))
        self.process.start()
        self.pid = self.process.pid
        return self.connection_info


def number(path):
    return int(path.stem.split("_")[0])


NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"), key=number)


def run(path):
    """The lesson with what its cells print and draw."""
    lesson = nbformat.read(path, as_version=4)
    lesson.cells.insert(0, nbformat.v4.new_code_cell(AXES_HAVE_NAMES))
    resources = {"metadata": {"path": path.parent}}
    options = {"timeout": 300, "record_timing": False, "coalesce_streams": True}
    manager = AsyncKernelManager(kernel_name="python3")
    manager.provisioner = Forked(parent=manager, kernel_spec=manager.kernel_spec, kernel_id=path.stem)
    client = NotebookClient(lesson, km=manager, resources=resources, **options)
    client.execute(cleanup_kc=True)
    lesson.cells.pop(0)
    for count, cell in enumerate((cell for cell in lesson.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = count
    return lesson


def pictures(lesson):
    """The data of each output with a picture."""
    outputs = (out for cell in lesson.cells for out in cell.get("outputs", []))
    return [out["data"] for out in outputs if "image/png" in out.get("data", {})]


def store(path):
    lesson = run(path)
    for data in pictures(lesson):
        picture, file = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))), io.BytesIO()
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(file, "PNG", optimize=True, dpi=picture.info["dpi"])
        data["image/png"] = base64.b64encode(file.getvalue()).decode()
    nbformat.write(lesson, path)


if __name__ == "__main__":
    for lesson_path in NOTEBOOKS:
        if not sys.argv[1:] or str(number(lesson_path)) in sys.argv[1:]:
            store(lesson_path)
            print(f"{lesson_path.name}: {lesson_path.stat().st_size / 1000:.0f} kB")
