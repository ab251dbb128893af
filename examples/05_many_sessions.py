"""Many users of one model: sessions that share what they have in common, and decode as one batch."""

import tempfile
from pathlib import Path

import torch

import sdm

torch.manual_seed(0)
config = sdm.SDMConfig(vocab_size=97, hidden_size=64, num_hidden_layers=4, num_slots=4096, num_writes=16, num_reads=16)
model = sdm.SDMForCausalLM(config).eval()

# A session is one stream of tokens. With a tokenizer it takes and gives text; here tokens are numbers.
start = sdm.Session(model)
start.add(range(30))
print("alone", [piece.token for piece in start.fork().generate(max_new_tokens=8)])

# Ten users continue the same start. They share its rows, and own those that they write.
users = [start.fork() for _ in range(10)]
table = sdm.cost(config).state_bytes()
print(f"a user's own state: {users[0].nbytes:,} bytes, shared {users[0].shared_nbytes:,}; a full table: {table:,}")
for number, user in enumerate(users):
    user.add([number, 5, 6])

# They decode as one batch; a session joins or leaves between two tokens, and no table is copied.
batch = sdm.Session.batch(users[:8], max_new_tokens=12)
answers = {user: [] for user in users}
for step in range(20):
    if step == 4:
        batch.join(users[8], max_new_tokens=12)
        batch.leave(users[0])
    for user, piece in batch.step():
        answers[user].append(piece.token)
print("lengths of the answers", [len(answers[user]) for user in users])
print(f"a user's own state now: {users[1].nbytes:,} bytes")

# Take back exactly what was said since a mark, and keep a session in a file.
user = users[9]
mark = user.mark()
first = [piece.token for piece in user.generate(max_new_tokens=8)]
user.rewind(mark)
assert first == [piece.token for piece in user.generate(max_new_tokens=8)]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "user.sdm"
    user.save(path)
    print("saved", f"{path.stat().st_size:,} bytes;", sdm.Session.load(path, model).length, "tokens")
