"""A local page to try an ensemble: two strategies side by side, their weights over time, experts switched off.

Needs the extra ``page``. Nothing is sent elsewhere or loaded from there: no analytics, no share link, local fonts.
"""

from __future__ import annotations

import socket
import time
import warnings
from contextlib import suppress
from typing import Any

import gradio as gr
import torch
import uvicorn
from fastapi import FastAPI
from PIL import Image, ImageOps

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError, line_of, note
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.trace import Trace
from ddm_lightning.evaluation.pretrained import DecentralizedEnsemble
from ddm_lightning.evaluation.samples import heat_map

_MAX_PROMPT = 2000
_MAX_IMAGES, _MAX_STEPS, _MAX_GUIDANCE = 8, 200, 20
# Height in pixels to which small images are scaled up.
_CELL_SIZE = 192
# Gradio keeps room for 320 pixels of images.
_CSS = ".grid-wrap {min-height: 0 !important}"


def serve(ensemble: DecentralizedEnsemble, host: str, port: int) -> None:
    """Serve the page of ``ensemble`` until Ctrl-C.

    Raises:
        UserError: the address cannot be had.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port}: must be from 0 to {2**16 - 1}")
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror}; give another --port or --host") from None
    warnings.filterwarnings("ignore", module="gradio")  # deprecations in gradio's own calls
    app, theme = FastAPI(openapi_url=None), gr.themes.Base()
    gr.mount_gradio_app(app, page(ensemble), "/", theme=theme, css=_CSS, footer_links=[], ssr_mode=False)
    if host not in ("127.0.0.1", "localhost"):
        note(f"everybody who reaches {host} can use the page; it asks for no password")
    print(f"page: http://{host}:{listener.getsockname()[1]} (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)).run([listener])


def page(ensemble: DecentralizedEnsemble) -> gr.Blocks:
    """Build the page of ``ensemble``."""
    about, core, kind = ensemble.about, ensemble.loaded.ensemble, ensemble.loaded.meta.condition["kind"]
    defaults, num_threads = SampleConfig(**about.sample), torch.get_num_threads()

    def generate(
        prompt: str, strategy: str, num: int, num_steps: int, guidance: float, seed: int | None, *factors: float
    ) -> tuple[list[Image.Image], str, Image.Image | None]:
        """Images of one strategy, a line about their cost, and the heat map of the experts' weights."""
        torch.set_num_threads(num_threads)  # a setting of each thread
        trace, start, rows, active = Trace(), time.perf_counter(), core.work.rows, core.work.active
        length = len((prompt or "").strip())
        described: dict[str, Any] = {"class": {"classes": [prompt]}, "none": {}}.get(kind, {"prompts": [prompt]})
        given: dict[str, Any] = {"strategy": strategy, "num": num, "num_steps": num_steps, "guidance_scale": guidance}
        try:
            if kind != "none" and not 1 <= length <= _MAX_PROMPT:
                raise UserError(f"the prompt has {length:,} characters; describe an image in 1 to {_MAX_PROMPT:,}")
            images = ensemble.sample(**described, **given, seed=seed, trace=trace, factors=factors or None)
        except (UserError, MemoryError, RuntimeError) as error:
            if (line := line_of(error)) is None:
                raise
            raise gr.Error(line, print_exception=False) from None
        experts = (core.work.active - active) / max(1, core.work.rows - rows)
        cost = f"{time.perf_counter() - start:.1f} s, {experts:.2f} active experts on average"
        scale = max(1, _CELL_SIZE // images[0].height)
        larger = [ImageOps.scale(image, scale, Image.Resampling.LANCZOS) for image in images]
        return larger, cost, _weights(trace, core.names)

    with gr.Blocks(title=about.name, analytics_enabled=False, delete_cache=(600, 3600), fill_width=True) as blocks:
        gr.Markdown(f"# {about.name}\n" + (f"Trained on: {about.credit}" if about.credit else ""))
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                condition = _described(kind, ensemble)
                button = gr.Button("Generate", variant="primary")
                guidance = gr.State(1.0)
                settings: list[Any] = [
                    gr.Slider(1, _MAX_IMAGES, min(4, defaults.num_per_prompt), step=1, precision=0, label="Images"),
                    gr.Slider(1, _MAX_STEPS, min(defaults.num_steps, _MAX_STEPS), step=1, precision=0, label="Steps"),
                ]
                if kind != "none":
                    guidance = gr.Slider(0, _MAX_GUIDANCE, defaults.guidance_scale, step=0.1, label="Guidance")
                settings += [guidance, gr.Number(about.seed, precision=0, label="Seed")]
                if core.num_clusters > 1:
                    gr.Markdown("**Experts**: each one's weight is multiplied by its number; 0 switches it off.")
                    settings += [gr.Slider(0, 1, 1, step=0.05, label=name) for name in core.names]
            first, *outputs = _side("A", defaults.strategy)
            second, *others = _side("B", "full" if defaults.strategy == "bayes" else "bayes")
        # Gradio runs one call of a function at a time. After an error of the first, the second would only repeat it.
        done = button.click(generate, [condition, first, *settings], outputs, api_name="generate")
        done.success(generate, [condition, second, *settings], others, api_visibility="private")
    return blocks


def _described(kind: str, ensemble: DecentralizedEnsemble) -> Any:
    """The field for the condition; a hidden state if there is none."""
    if kind == "none":
        return gr.State("")
    if kind == "class":
        names = ensemble.about.class_names or list(map(str, range(ensemble.loaded.meta.condition["size"])))
        return gr.Dropdown(names, value=names[0], label="Class")
    prompts = ensemble.about.sample["prompts"]
    return gr.Textbox(prompts[0] if prompts else "", label="Prompt", lines=2)


def _side(name: str, strategy: str) -> list[Any]:
    """A column: strategy, images, cost and weights."""
    with gr.Column(scale=2, min_width=320):
        return [
            gr.Dropdown(STRATEGIES.names(), value=strategy, label=f"Strategy {name}"),
            gr.Gallery(columns=4, height="auto", object_fit="contain", format="png", show_label=False, buttons=[]),
            gr.Markdown(),
            gr.Image(format="png", interactive=False, show_label=False, buttons=[]),  # a button covers the drawing
        ]


def _weights(trace: Trace, names: list[str]) -> Image.Image | None:
    """Heat map of the mean weights and of each image's; None for a strategy that does not tell them."""
    every = {f"weights for image {i + 1}": weights for i, weights in enumerate(trace.weights.values())}
    mean = {"mean weights": torch.stack(list(every.values())).mean(0)} if len(every) > 1 else {}
    return heat_map(trace.times, mean | every, names) if every else None
