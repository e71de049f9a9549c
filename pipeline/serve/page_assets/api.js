// The server's addresses, as any client asks them. The key lies in sessionStorage: this tab's, gone with it.

/** Tells the document that an answer is waited for; `detail` says why, and is empty once it is not any more. */
export const WAITING = "cairn-waiting";
const MAX_TRIES = 20;
const MAX_RETRY_SECONDS = 5;
const KEPT = "cairn-key";
const ROOT = new URL("v1/", document.baseURI);

/** What the server refused, or that it could not be reached; `detail` is a sentence for a person, `retrySeconds` when to ask again. */
export class Refusal extends Error {
  constructor(status, type, detail, retrySeconds = NaN) {
    super(detail);
    this.status = status;
    this.retrySeconds = retrySeconds;
    this.type = type;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEPT) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEPT, value) : sessionStorage.removeItem(KEPT)),
};

/** Ask, and once more where the server says that it may answer soon: a collection that is being opened, a moment's overload. */
async function ask(path, options) {
  try {
    for (let tries = 1; ; tries += 1) {
      try {
        return await askOnce(path, options);
      } catch (error) {
        if (!(error.retrySeconds <= MAX_RETRY_SECONDS) || tries === MAX_TRIES) throw error;
        tellWaiting(error.message);
        await new Promise((resolve) => setTimeout(resolve, 1_000 * error.retrySeconds));
        options.signal?.throwIfAborted();
      }
    }
  } finally {
    tellWaiting("");
  }
}

const tellWaiting = (detail) => document.dispatchEvent(new CustomEvent(WAITING, { detail }));

const authorization = () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {});

async function askOnce(path, options) {
  const headers = { Accept: "application/json", ...authorization(), ...options.headers };
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { ...options, headers, credentials: "omit", referrerPolicy: "no-referrer" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  const body = await response.json().catch(() => null);
  options.signal?.throwIfAborted();
  if (response.ok && body !== null) return body;
  const retry = response.status === 503 ? parseFloat(response.headers.get("Retry-After")) : NaN;
  throw new Refusal(response.status, body?.type ?? "", sentence(body, response.status), retry);
}

const unreachable = () => new Refusal(0, "unreachable", "The server does not answer.");

function sentence(problem, status) {
  if (!problem?.title) return `The server answered ${status}.`;
  const parts = problem.errors?.map((error) => error.detail) ?? [problem.detail];
  return `${[problem.title, parts.filter(Boolean).join("; ")].filter(Boolean).join(": ")}.`;
}

export const get = (path, signal) => ask(path, { signal });
export const post = (path, body, signal) =>
  ask(path, { method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

export const remove = (path) => ask(path, { method: "DELETE" });

/** Send a file, which the server forgets after an hour; `progress(share)` hears how much of it has gone. */
export function sendFile(file, progress) {
  const form = new FormData();
  const fields = { purpose: "user_data", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600", file };
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  const request = new XMLHttpRequest(); // fetch tells no progress
  request.open("POST", new URL("files", ROOT));
  request.responseType = "json";
  for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
  request.upload.addEventListener("progress", ({ loaded, total }) => progress(loaded / total));
  return new Promise((resolve, reject) => {
    request.addEventListener("load", () => {
      if (request.status === 200) resolve(request.response);
      else reject(new Refusal(request.status, request.response?.type ?? "", sentence(request.response, request.status)));
    });
    request.addEventListener("error", () => reject(unreachable()));
    request.send(form);
  });
}

export const collectionPath = (name, rest = "") => `collections/${encodeURIComponent(name)}${rest}`;
export const documentPath = (name, id) => collectionPath(name, `/documents/${encodeURIComponent(id)}`);
