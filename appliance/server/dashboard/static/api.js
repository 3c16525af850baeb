// Requests to the server that sent this page, with the key that a person typed.

const KEY = "appliance-key"; // of the tab's storage

export class WrongKey extends Error {}

export class Refused extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  keep: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
  onWanted: (wrong) => {}, // called with whether the key that was sent was refused
};

export async function ask(path, options = {}) {
  const known = key.get();
  const headers = { ...options.headers, ...(known ? { Authorization: `Bearer ${known}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401) {
    key.onWanted(known !== null);
    throw new WrongKey("the server wants its API key");
  }
  if (!response.ok) {
    const error = (await response.json().catch(() => null))?.error;
    throw new Refused(error?.message ?? `the server answered ${response.status}`, error?.code);
  }
  return response;
}

export const byId = (id) => document.getElementById(id);
export const number = new Intl.NumberFormat("en");
