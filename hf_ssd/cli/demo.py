"""`hf-ssd demo`."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Assistant, AssistantThreads, Dtype, Target, TargetThreads, errors, still

PACKAGE = "hf_ssd_demo"


def demo(
    target: Target = None,
    assistant: Assistant = None,
    dtype: Dtype = "bfloat16",
    device: Annotated[
        str, typer.Option(help='Device of the target, or "auto": the accelerator if there is one.')
    ] = "auto",
    target_threads: TargetThreads = None,
    assistant_threads: AssistantThreads = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Most tokens of a prompt, the conversation included.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer that the page offers.")] = 256,
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default is reached from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on. Default: the first free one from 7860 on.", show_default=False),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page on which plain decoding, speculative decoding and SSD race each other."""
    with errors():
        package = demo_package()
        options = package("options").DemoOptions(
            target=target,
            assistant=assistant,
            dtype=dtype,
            device=device,
            target_threads=target_threads,
            assistant_threads=assistant_threads,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
        )
        still()

        def announce(address: str) -> None:
            typer.echo(f"The page is at {address} (Ctrl-C ends it). Models are loading; it says when they are ready.")

        package("app").serve(options, host=host, port=port, open_browser=open_browser, announce=announce)


def demo_package() -> Any:
    """A function that imports a module of the demo by its name.

    A wheel installs the demo beside `hf_ssd`, by a name of its own; in a clone it is the folder `demo`.

    Raises:
        ImportError: If gradio is missing, or the demo.
    """
    try:
        import_module("gradio")
    except ImportError as error:
        raise ImportError(f"`hf-ssd demo` needs gradio ({error}). Run: pip install 'hf-ssd[demo]'") from error
    if find_spec(PACKAGE) is None:
        folder = Path(__file__).parents[2] / "demo"
        spec = spec_from_file_location(PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)])
        if spec is None or spec.loader is None or not folder.is_dir():
            raise ImportError(f"The demo is missing: neither {PACKAGE} nor {folder} is there. Install hf-ssd anew.")
        sys.modules[PACKAGE] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACKAGE])
    return lambda name: import_module(f"{PACKAGE}.{name}")
