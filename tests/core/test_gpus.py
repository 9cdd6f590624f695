"""GPUs by torch's name of them, their neighbours that are others, and users' own."""

import csv
from pathlib import Path

import pytest

from ddm_lightning.core import gpus
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.gpus import find_gpu, parse_gpu

# What torch.cuda.get_device_name returns, or what a user, SkyPilot or SLURM calls it; then the GPU that it is.
NAMES = {
    "NVIDIA B300 SXM6 AC": "B300 270GB",
    "NVIDIA B200": "B200 180GB",
    "NVIDIA GB200": "GB200 186GB",
    "NVIDIA GH200 480GB": "GH200 96GB",  # of the host
    "NVIDIA H200": "H200 141GB",
    "NVIDIA H200 NVL": "H200 NVL 141GB",
    "NVIDIA H100 80GB HBM3": "H100 80GB",
    "H100 SXM": "H100 80GB",
    "NVIDIA H100 PCIe": "H100 PCIe 80GB",
    "NVIDIA H100 NVL": "H100 NVL 94GB",
    "NVIDIA H20": "H20 96GB",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB",
    "A100-80GB": "A100 80GB",
    "NVIDIA A40": "A40 48GB",
    "NVIDIA A30": "A30 24GB",
    "NVIDIA A10": "A10 24GB",
    "NVIDIA A10G": "A10G 24GB",
    "NVIDIA L4": "L4 24GB",
    "NVIDIA L40": "L40 48GB",
    "NVIDIA L40S": "L40S 48GB",
    "NVIDIA L20": "L20 48GB",
    "Tesla T4": "T4 16GB",
    "Tesla V100-SXM2-16GB": "V100 16GB",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla V100-PCIE-16GB": "V100 PCIe 16GB",
    "Tesla V100S-PCIE-32GB": "V100S 32GB",
    "NVIDIA RTX A6000": "RTX A6000 48GB",
    "A6000": "RTX A6000 48GB",
    "NVIDIA RTX A5000": "RTX A5000 24GB",
    "NVIDIA RTX A4000": "RTX A4000 16GB",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada 48GB",
    "RTX6000-Ada": "RTX 6000 Ada 48GB",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 96GB",
    "NVIDIA GeForce RTX 5090": "RTX 5090 32GB",
    "NVIDIA GeForce RTX 5080": "RTX 5080 16GB",
    "NVIDIA GeForce RTX 5070 Ti": "RTX 5070 Ti 16GB",
    "NVIDIA GeForce RTX 4090": "RTX 4090 24GB",
    "rtx_4090": "RTX 4090 24GB",
    "NVIDIA GeForce RTX 4080": "RTX 4080 16GB",
    "NVIDIA GeForce RTX 4080 SUPER": "RTX 4080 SUPER 16GB",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX 4070 Ti SUPER 16GB",
    "NVIDIA GeForce RTX 3090": "RTX 3090 24GB",
    "NVIDIA GeForce RTX 3090 Ti": "RTX 3090 Ti 24GB",
    "NVIDIA GeForce RTX 3080": "RTX 3080 10GB",
    "AMD Instinct MI300X": "MI300X 192GB",
    "AMD Instinct MI325X": "MI325X 256GB",
    "AMD Instinct MI250X / MI250": "MI250X 64GB",
    # Others, which have other figures.
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA A10-24Q": None,
    "NVIDIA A100X": None,
    "NVIDIA A1000": None,
    "NVIDIA A400": None,
    "NVIDIA RTX A400": None,
    "NVIDIA T400 4GB": None,
    "NVIDIA L40G": None,
    "Quadro RTX 6000": None,
    "NVIDIA RTX 4000 Ada Generation": None,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
    "NVIDIA GeForce RTX 5090 D": None,
    "NVIDIA GeForce RTX 5090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 3080 Ti": None,
    "NVIDIA GeForce RTX 3080 Ti Laptop GPU": None,
    "NVIDIA GeForce RTX 3080 Laptop GPU": None,
    "NVIDIA GeForce GTX 1080": None,
    "AMD Instinct MI300A": None,
    "AMD Radeon Graphics": None,
}


def test_names_are_told_apart():
    found = {name: find_gpu(name) for name in NAMES}
    assert {name: gpu and gpu.name for name, gpu in found.items()} == NAMES


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", False, 989.4),
        ("NVIDIA H100 PCIe", "bf16-mixed", False, 756.0),
        ("NVIDIA H200 NVL", "16-mixed", False, 835.5),
        ("NVIDIA A100-SXM4-80GB", "32-true", True, 156.0),
        ("NVIDIA A100-SXM4-80GB", "32-true", False, 19.5),
        ("NVIDIA L40S", "bf16-mixed", False, 362.0),
        ("Tesla V100-SXM2-16GB", "bf16-mixed", True, None),
        ("Tesla V100-SXM2-16GB", "16-mixed", True, 125.0),
        ("Tesla T4", "32-true", True, 8.1),
        ("AMD Instinct MI300X", "bf16-mixed", True, 1307.4),
    ],
)
def test_peaks_are_dense_and_by_precision(name, precision, tf32, expected):
    assert find_gpu(name).peak(precision, tf32=tf32) == expected


def test_peaks_follow_from_what_vendors_advertise():
    """GeForce's "AI TOPS" are sparse FP8 up to Ada, sparse FP4 since: dense bfloat16 is an eighth or a sixteenth."""
    advertised = {"5090": 3352, "5080": 1801, "5070 Ti": 1406, "5070": 988}
    for name, tops in advertised.items():
        assert find_gpu(name).peak("bf16-mixed") == pytest.approx(tops / 16, rel=2e-3)
    advertised = {"4090": 1321, "4080 SUPER": 836, "4080": 780, "4070 Ti SUPER": 706, "4070 Ti": 641, "4070": 466}
    for name, tops in advertised.items():
        assert find_gpu(name).peak("bf16-mixed") == pytest.approx(tops / 8, rel=2e-3)


def test_every_figure_has_a_source_and_is_plausible():
    with Path(gpus.__file__).with_name("gpus.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["name"] for row in rows}) == len(rows) >= 40
    for row in rows:
        assert row["source"].startswith(("NVIDIA ", "AMD ")), row
        bf16, fp16, tf32, fp32 = (float(row[name] or 0) for name in ("bf16", "fp16", "tf32", "fp32"))
        # Half precision is at least twice, TF32 at most half of it; GPUs without bfloat16 have no TF32.
        assert bf16 in (0, fp16) and fp16 >= 1.99 * fp32 and fp32 <= tf32 <= fp16 / 1.96 + 1e-9, row
        assert bf16 or tf32 == fp32, row


def test_a_gpu_of_ones_own():
    own = parse_gpu("name=My GPU, tflops=120 ,memory_gb=23.5")
    assert (own.name, own.num_bytes) == ("My GPU", 23_500_000_000)
    assert [own.peak(precision) for precision in ("bf16-mixed", "16-mixed", "32-true")] == [120, 120, 60]
    assert own.peak("32-true", tf32=False) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Abacus", "unknown device 'Abacus'; known: B300, GB200, "),
        ("name=X,tflops=1", "key 'memory_gb' is missing; write it as name=MyGPU,tflops=120,memory_gb=24"),
        ("name=X,tflops=-1,memory_gb=24", "key 'tflops' = '-1': must be a positive number"),
        ("name=X,tflops=0.0,memory_gb=24", "key 'tflops' = '0.0': must be a positive number"),
        ("name=X,tflops=1,memory_gb=24GB", "key 'memory_gb' = '24GB': must be a positive number"),
        ("name=,tflops=1,memory_gb=24", "key 'name' = '': must be a string of one line"),
        ("name=X,tflop=1,memory_gb=24", "key 'tflops' is missing"),
        ("name=X,tflops=1,memory_gb=24,price=3", "unknown key 'price'"),
        ("name=X,tflops=1,memory_gb=24,", "unknown key ''"),
    ],
)
def test_a_bad_description_is_one_line(text, words):
    with pytest.raises(UserError) as caught:
        parse_gpu(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)
