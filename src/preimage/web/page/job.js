// One job of this page at a time: asked for, followed event by event, cancelled.
import { notice } from "/static/tokens.js";

const find = (id) => document.getElementById(id);
let current = null;

export const isBusy = () => current !== null;

export async function ask(path, options = {}) {
  let answer, document_;
  try {
    answer = await fetch(path, options);
    document_ = await answer.json();
  } catch {
    throw { message: "The server does not answer.", hint: "Is preimage serve still running?" };
  }
  if (!answer.ok) throw document_.error;
  return document_;
}

export function complain(out, error) {
  out.append(notice(error.message || "Something went wrong.", error.hint || "", "bad"));
}

export function announce(text) {
  find("said").textContent = text;
}

function now(text, done = 0, total = 0) {
  find("now").textContent = text;
  const bar = find("progress");
  if (total > 1) {
    bar.max = total;
    bar.value = done;
  } else bar.removeAttribute("value");
}

function busy(on) {
  find("bar").hidden = !on;
  for (const one of document.querySelectorAll(".go, #go-margins")) {
    if (on) one.dataset.was = one.disabled ? "off" : "on";
    one.disabled = on || one.dataset.was === "off";
  }
}

// What is asked for, where errors go, and what is done with each kind of event. Resolves with the last state.
export async function follow(asked, out, handlers) {
  if (current) return "busy";
  current = { id: null, source: null };
  busy(true);
  now("Asked.");
  announce("Started.");
  const began = performance.now();
  try {
    const { id } = await ask("/api/jobs", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked),
    });
    current.id = id;
    return await listen(id, out, handlers, began);
  } catch (error) {
    complain(out, error);
    announce(error.message || "Something went wrong.");
    return "failed";
  } finally {
    current = null;
    const back = document.activeElement === find("cancel");
    busy(false);
    if (back) document.querySelector("[role=tabpanel]:not([hidden]) .go")?.focus();
  }
}

function listen(id, out, handlers, began) {
  return new Promise((resolve) => {
    const source = new EventSource(`/api/jobs/${encodeURIComponent(id)}/events`);
    current.source = source;
    const end = (state) => {
      source.close();
      announce({ done: "Done.", cancelled: "Cancelled.", failed: "It failed." }[state] || "Ended.");
      resolve(state);
    };
    let lost = 0;
    source.onerror = () => {
      lost += 1;
      now("The server does not answer; asking again.");
      if (source.readyState === EventSource.CLOSED || lost > 3) {
        complain(out, { message: "The server does not answer.", hint: "Is preimage serve still running?" });
        end("failed");
      }
    };
    source.onmessage = (message) => {
      lost = 0;
      const event = JSON.parse(message.data);
      event.after = performance.now() - began;
      if (event.type === "before") now(event.jobs ? `Waiting: ${event.jobs} before it.` : "Waiting for the model.");
      else if (event.type === "state") now("Running.");
      else if (event.type === "stage")
        now(event.total > 1 ? `${event.text}: ${event.done} of ${event.total}` : event.text, event.done, event.total);
      else if (event.type === "error") {
        if (event.code === "cancelled") out.append(notice(event.message, "", "warn"));
        else complain(out, event);
      } else if (event.type === "end") return end(event.state);
      handlers[event.type]?.(event);
    };
  });
}

export async function cancel() {
  if (!current?.id) return;
  now("Cancelling: the pass that runs is ended first.");
  try {
    await ask(`/api/jobs/${encodeURIComponent(current.id)}`, { method: "DELETE" });
  } catch (error) {
    announce(error.message);
  }
}
