#!/usr/bin/env bash
# webdataset: members of a tar that are hard links are skipped, without a warning.
#
# One would expect  a tar to give every file that `tar -x` would write. GNU tar stores the second of two hard-linked files
#                   as a link; data sets deduplicated by links, and copies made by `cp -l`, are full of them.
# What happens      the second image is gone, and its caption arrives as a sample without an image.
# Seen              2026-11-27, webdataset 1.0.2, numpy 2.1.3, GNU tar 1.34, Python 3.11:
#                     tar: a.jpg a.txt b.jpg b.txt
#                     webdataset: a ['jpg', 'txt']
#                     webdataset: b ['txt']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet webdataset==1.0.2 numpy==2.1.3
mkdir "$folder/images"
cd "$folder/images"
echo "bytes of an image" >a.jpg
ln a.jpg b.jpg
echo "a cat" >a.txt
echo "the same cat" >b.txt
tar --sort=name -cf ../images.tar a.jpg a.txt b.jpg b.txt
echo "tar:" $(tar -tf ../images.tar)
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import webdataset

found = []
for sample in webdataset.WebDataset("images.tar", shardshuffle=False):
    fields = sorted(name for name in sample if not name.startswith("__"))
    print("webdataset:", sample["__key__"], fields)
    found.append((sample["__key__"], fields))
assert found == [("a", ["jpg", "txt"]), ("b", ["txt"])]
PY
