// Files that are dropped or chosen, and how they get to the server: one a request, as they are.
import { ask } from "/static/job.js";

const MANIFEST = "manifest.json";
const SKIPPED = "record.jsonl"; // who made a bundle; nothing an inversion needs

// Files of what was dropped; of a folder, those right inside it.
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter((entry) => entry);
  const folders = entries.filter((entry) => entry.isDirectory);
  if (!folders.length) return [...transfer.files];
  const inside = [];
  for (const folder of folders) {
    const reader = folder.createReader();
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    for (const entry of some.filter((one) => one.isFile)) inside.push(await new Promise((resolve, reject) => entry.file(resolve, reject)));
  }
  return inside;
}

export async function upload(files, limit, say) {
  const wanted = files.filter((file) => file.name !== SKIPPED);
  wanted.sort((a, b) => (b.name === MANIFEST) - (a.name === MANIFEST));
  const size = wanted.reduce((sum, file) => sum + file.size, 0);
  if (limit && size > limit)
    throw { message: `${(size / 2 ** 20).toFixed(0)} MiB are more than the page takes.`, hint: "Use preimage invert, which takes any size." };
  let to = null;
  for (const file of wanted) {
    say(`sending ${file.name}`);
    const query = new URLSearchParams({ name: file.name, ...(to ? { to } : {}) });
    const answer = await ask(`/api/uploads?${query}`, {
      method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file,
    });
    to = answer.upload;
  }
  return to;
}
