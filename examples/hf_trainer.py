"""Hugging Face's Trainer, elastic: start a daemon (`forged run`), then this script as often as you like.

python examples/hf_trainer.py [ENDPOINT [FOLDER]]
"""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification

import forged.torch as ft

ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:7433"
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "hf_checkpoints"

torch.manual_seed(0)
tokens = torch.randint(1, 64, (480, 12))
dataset = [{"input_ids": row, "labels": (row[0] > 32).long()} for row in tokens]
model = BertForSequenceClassification(
    BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
)

trainer = ft.Trainer(
    model=model,
    args=ft.TrainingArguments(
        output_dir=FOLDER,
        max_steps=60,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=dataset,
    global_batch=24,
    join={"endpoints": [ENDPOINT], "job": "hf-trainer", "checkpoints": ft.Checkpoints(FOLDER, every=20, keep=2)},
)
print(f"trained {trainer.train().global_step} steps")
