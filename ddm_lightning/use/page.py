"""A local page to try an ensemble: two strategies side by side, their weights over time, experts switched off.

Needs the extra ``page``. Nothing is sent elsewhere or loaded from there: no analytics, no share link, local fonts.
Serve only the page's own routes; Gradio's others, such as uploads, are closed.
"""

from __future__ import annotations

import logging
import re
import socket
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from html import escape
from typing import Any

import gradio as gr
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from PIL import Image, ImageOps

from ddm_lightning.core.errors import UserError, line_of, note
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Trace
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.samples import weights_chart

NUM_EXAMPLES = 24
"""Captions to offer."""
_MAX_PROMPT = 2000
_MAX_IMAGES = 8
_MAX_STEPS = 200
_MAX_GUIDANCE = 20
# Height in pixels to which small images are scaled up.
_CELL_SIZE = 192
# By default Gradio reserves a height of 320 pixels for images.
_CSS = ".grid-wrap {min-height: 0 !important}"
# All that the browser and gradio_client ask for. ``file=`` also takes URLs, to which Gradio would redirect.
_ROUTES = {
    "GET": r"/|/config|/theme\.css|/favicon\.ico|/(assets|static)/.+"
    r"|/gradio_api/(info|app_id|queue/data|heartbeat/\w+|file=/.+)",
    "POST": "/gradio_api/queue/join",
}


def listen(host: str, port: int) -> socket.socket:
    """Open the port of the page.

    Raises:
        UserError: the address is not available.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port}: must be from 0 to {2**16 - 1}")

    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror}; give another --port or --host") from None


def serve(ensemble: DecentralizedEnsemble, listener: socket.socket, host: str, captions: Sequence[str] = ()) -> None:
    """Serve the page of ``ensemble`` until Ctrl-C.

    Args:
        ensemble: the ensemble.
        listener: from ``listen``.
        host: name or address given to ``listen``.
        captions: see ``page``.
    """
    warnings.filterwarnings("ignore", module="gradio")  # deprecations in gradio's own calls
    app = FastAPI(openapi_url=None)
    theme = gr.themes.Base()
    gr.mount_gradio_app(app, page(ensemble, captions), "/", theme=theme, css=_CSS, footer_links=[], ssr_mode=False)
    _guard(app, host)
    if host not in ("127.0.0.1", "localhost"):
        note(f"anyone who can reach {host} can use the page; it asks for no password")

    print(f"page: http://{host}:{listener.getsockname()[1]} (Ctrl-C ends it)", flush=True)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # Gradio's open streams refuse to be closed at Ctrl-C
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    with suppress(KeyboardInterrupt):
        server.run([listener])


def _guard(app: FastAPI, host: str) -> None:
    """Refuse other routes, and host names that are not this machine's.

    Otherwise a foreign website could point its own name here and read the answers (DNS rebinding).
    """
    names = "|".join(map(re.escape, (host, "localhost", socket.gethostname())))
    own = re.compile(rf"({names}|[\d.]+|\[[\da-f:.]+\])(:\d+)?", re.IGNORECASE)

    @app.middleware("http")  # type: ignore[untyped-decorator]  # fastapi is not checked
    async def answer(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if own.fullmatch(request.headers.get("host", "")) is None:
            return PlainTextResponse(f"use {host}, localhost or an address in place of this name\n", 421)
        if re.fullmatch(_ROUTES.get(request.method, ""), request.url.path) is None:
            return PlainTextResponse("not part of the page\n", 404)

        return await go_on(request)


class _Page(gr.Blocks):  # type: ignore[misc]  # gradio is not checked
    """Blocks that refuse a value out of range without a traceback."""

    async def preprocess_data(self, *args: Any, **more: Any) -> list[Any]:
        try:
            return await super().preprocess_data(*args, **more)
        except gr.Error as error:
            error.print_exception = False
            raise


def page(ensemble: DecentralizedEnsemble, captions: Sequence[str] = ()) -> gr.Blocks:
    """Build the page of ``ensemble``.

    Args:
        ensemble: the ensemble.
        captions: offered as examples; the experiment's prompts if there are none.
    """
    field = ensemble.field
    kind = ensemble.meta.condition.kind
    defaults = ensemble.about.sample
    sizes = {bucket.name: bucket.size for bucket in ensemble.meta.buckets}
    num_threads = torch.get_num_threads()
    ensemble.set_progress_bar_config(disable=True)  # the browser shows its own

    def check(prompt: str) -> None:
        """Refuse a prompt before the images of an earlier one are cleared."""
        length = len((prompt or "").strip())
        if kind not in ("class", "none") and not 0 < length <= _MAX_PROMPT:
            problem = f"the prompt has {length:,} characters; describe an image in 1 to {_MAX_PROMPT:,}"
            raise gr.Error(problem, print_exception=False)

    def generate(
        prompt: str, strategy: str, num: int, num_steps: int, guidance: float, seed: int, shape: str, *factors: float
    ) -> tuple[list[Image.Image], str, Image.Image | None]:
        """Images of one strategy, a line about their cost, and the heat map of the experts' weights."""
        torch.set_num_threads(num_threads)  # a setting of each thread
        trace = Trace()
        start = time.perf_counter()
        rows = field.work.rows
        active = field.work.active
        check(prompt)
        height, width = sizes.get(shape, (None, None))
        try:
            if None in (num, num_steps, guidance, seed):
                raise UserError("a number is empty; fill it in")

            images = ensemble.sample(
                [prompt] if kind not in ("class", "none") else None,
                classes=[prompt] if kind == "class" else None,
                strategy=strategy,
                num=num,
                num_steps=num_steps,
                guidance_scale=guidance,
                seed=seed,
                height=height,
                width=width,
                trace=trace,
                factors=factors or None,
            )
        except (UserError, MemoryError, RuntimeError) as error:
            line = line_of(error)
            if line is None:
                raise

            raise gr.Error(line, print_exception=False) from None

        seconds = time.perf_counter() - start
        experts = (field.work.active - active) / max(1, field.work.rows - rows)
        cost = f"{seconds:.1f} s, {experts:.2f} active experts on average"
        scale = max(1, _CELL_SIZE // images[0].height)
        larger = [ImageOps.scale(image, scale, Image.Resampling.LANCZOS) for image in images]
        return larger, cost, _weights(trace, field.cluster_names)

    title = ensemble.about.name
    with _Page(title=title, analytics_enabled=False, delete_cache=(600, 3600), fill_width=True) as blocks:
        # Not Markdown, which may load images from elsewhere.
        gr.HTML(f"<h1>{escape(title)}</h1><p>{escape(ensemble.credit_line)}</p>")
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                if kind not in ("class", "none"):
                    condition: Any = gr.Textbox(next(iter(defaults.prompts), ""), label="Prompt", lines=2)
                    examples = gr.Dataset(
                        components=[condition],
                        samples_per_page=6,
                        samples=[[text] for text in captions or defaults.prompts],
                        label=("Captions" if captions else "Examples; captions") + " of the training images work best",
                    )
                    examples.click(
                        lambda row: row[0], examples, condition, show_progress="hidden", api_visibility="private"
                    )
                elif kind == "class":
                    classes = ensemble.about.class_names or list(map(str, range(ensemble.meta.condition.size)))
                    condition = gr.Dropdown(classes, value=classes[0], label="Class")
                else:
                    condition = gr.State("")

                button = gr.Button("Generate", variant="primary")
                guidance = gr.State(1.0)
                settings: list[Any] = [
                    gr.Slider(1, _MAX_IMAGES, min(4, defaults.num_per_prompt), step=1, label="Images"),
                    gr.Slider(1, _MAX_STEPS, min(defaults.num_steps, _MAX_STEPS), step=1, label="Steps"),
                ]
                if kind != "none":
                    guidance = gr.Slider(0, _MAX_GUIDANCE, defaults.guidance_scale, step=0.1, label="Guidance")

                shape = gr.State("")
                own = ensemble.bucket_of()
                if own is not None:
                    shape = gr.Dropdown([*sizes], value=own.name, label="Height x width")

                settings += [guidance, gr.Number(ensemble.about.seed, label="Seed"), shape]
                if field.num_clusters > 1:
                    gr.Markdown("**Experts**: each one's weight is multiplied by its number; 0 switches it off.")
                    settings += [gr.Slider(0, 1, 1, step=0.05, label=name) for name in field.cluster_names]

            first, *outputs = _side("A", defaults.strategy)
            second, *others = _side("B", "full" if defaults.strategy == "bayes" else "bayes")

        # Gradio runs one call of a function at a time. After an error of the first, the second would only repeat it.
        checked = button.click(check, condition, None, show_progress="hidden", api_visibility="private")
        done = checked.success(generate, [condition, first, *settings], outputs, api_name="generate")
        both_done = done.success(generate, [condition, second, *settings], others, api_visibility="private")
        # Images of an earlier prompt must not stay beside the error.
        done.failure(lambda: [None] * 6, None, [*outputs, *others], api_visibility="private")
        both_done.failure(lambda: [None] * 3, None, others, api_visibility="private")

    return blocks


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
    """Heat map of the mean weights and of each image's; None for a strategy that records none."""
    if not trace.weights:
        return None

    images = list(trace.weights.values())
    panels = {}
    if len(images) > 1:
        panels["mean weights"] = torch.stack(images).mean(0)

    for number, weights in enumerate(images, 1):
        panels[f"weights for image {number}"] = weights

    return weights_chart(trace.times, panels, names)
