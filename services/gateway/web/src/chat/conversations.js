// Conversations, kept in this browser alone. The newest is first.
import { newId } from "../api.js";
import { Store, load, save } from "../store.js";

const KEY = "shoal.conversations";
const MAX_KEPT = 100;

export const conversations = new Store(load(KEY, []));
export const unsaved = new Store(false); // the browser would not keep them

export const DEFAULTS = {
  model: "",
  system: "",
  temperature: 0.7,
  top_p: 1,
  top_k: 0,
  min_p: 0,
  max_tokens: "",
  seed: "",
  presence_penalty: 0,
  frequency_penalty: 0,
  repetition_penalty: 1,
  stop: "",
  tokens: false, // show each token with its log-probabilities
};

export const settings = new Store({ ...DEFAULTS, ...load("shoal.settings", {}) });

export function changeSettings(changes) {
  settings.set({ ...settings.value, ...changes });
  save("shoal.settings", settings.value);
}

export function newConversation() {
  return { id: newId(), title: "", messages: [] };
}

/** Keeps a conversation, as the newest. One without messages is not worth it. */
export function keep(conversation) {
  const others = conversations.value.filter(({ id }) => id !== conversation.id);
  store(conversation.messages.length ? [titled(conversation), ...others] : others);
}

export function forget(id) {
  store(conversations.value.filter((conversation) => conversation.id !== id));
}

function store(list) {
  const kept = list.slice(0, MAX_KEPT);
  conversations.set(kept);
  // Single tokens with their alternatives are many times the text: they go with the page.
  const slim = kept.map((each) => ({
    ...each,
    messages: each.messages.map(({ tokens, ...message }) => message),
  }));
  unsaved.set(!save(KEY, slim));
}

function titled(conversation) {
  const first = conversation.messages.find(({ role }) => role === "user")?.content ?? "";
  return { ...conversation, title: first.slice(0, 80).split("\n")[0] || "Untitled" };
}
