// Reads the API: one place for addresses, the key, errors, and media as URLs that an element can show.
import type { Site } from "./types";

const KEY_NAME = "relax-key";
let key = sessionStorage.getItem(KEY_NAME) ?? "";
let askForKey: () => void = () => {};
let site: Site = { mode: "live", version: "", keys: false };

/** What could not be read: the server's own words, with the HTTP status; 0 where no server answered. */
export class ReadError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

export function onKeyWanted(ask: () => void): void {
  askForKey = ask;
}

export function setKey(value: string): void {
  key = value.trim();
  sessionStorage.setItem(KEY_NAME, key);
  begun.clear();
}

export function hasKey(): boolean {
  return key !== "";
}

export function isBundle(): boolean {
  return site.mode === "bundle";
}

export function siteInfo(): Site {
  return site;
}

/** An address of the API as one that fetch takes: relative ones start at the page. */
export function address(path: string): string {
  return new URL(path, document.baseURI.split("#")[0]).href;
}

function headers(): HeadersInit {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

const begun = new Map<string, Promise<Response>>();

/** Asks for `data/<path>` now; the first `read` of it takes this answer, so that the request does not wait for its view. */
export function begin(path: string): void {
  const answer = fetch(address(`data/${path}`), { headers: headers() });
  answer.catch(() => {}); // told where it is read
  begun.set(`data/${path}`, answer);
}

function taken(path: string): Promise<Response> | undefined {
  const answer = begun.get(path);
  begun.delete(path);
  return answer;
}

/** Asks for `path`; raises `ReadError` in plain words when nothing usable came. */
export async function get(path: string, signal?: AbortSignal): Promise<Response> {
  let response: Response;
  try {
    response = await (taken(path) ?? fetch(address(path), { headers: headers(), signal }));
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ReadError("The server does not answer. Is `relax view` still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 401 || response.status === 403) askForKey();
  throw new ReadError(await errorText(response), response.status);
}

async function errorText(response: Response): Promise<string> {
  try {
    const body = await response.json();
    if (typeof body?.error?.message === "string") return body.error.message;
  } catch {
    // Not JSON: a file server's own page.
  }
  if (response.status === 404) return "This is not there (404).";
  return `The server answered ${response.status}.`;
}

/** JSON at `data/<path>`, with parameters unless the site is a bundle of files. */
export async function read<T>(
  path: string,
  parameters: Record<string, string | number | null | undefined> = {},
  signal?: AbortSignal,
): Promise<T> {
  const query = new URLSearchParams();
  if (!isBundle()) {
    for (const [name, value] of Object.entries(parameters)) {
      if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
    }
  }
  const asked = query.toString();
  const response = await get(`data/${path}${asked ? `?${asked}` : ""}`, signal);
  try {
    return (await response.json()) as T;
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ReadError("The server's answer is not JSON: it was cut, or this is no viewer.", response.status);
  }
}

export async function loadSite(): Promise<Site> {
  site = await read<Site>("site.json");
  if (site.keys && !hasKey()) askForKey();
  return site;
}

export function runPath(run: string): string {
  return `runs/${encodeURIComponent(run)}`;
}

/** A URL that a media element can use: the server's own where it needs no key, else a blob's. Call `done` when it is not shown any more. */
export async function mediaUrl(url: string, signal?: AbortSignal): Promise<{ url: string; done: () => void }> {
  if (!site.keys) return { url: address(dataPath(url)), done: () => {} };
  const blob = await (await get(dataPath(url), signal)).blob();
  const made = URL.createObjectURL(blob);
  return { url: made, done: () => URL.revokeObjectURL(made) };
}

export async function mediaBytes(url: string, signal?: AbortSignal): Promise<ArrayBuffer> {
  return (await get(dataPath(url), signal)).arrayBuffer();
}

/** URLs in answers are relative to the page, or to data/. */
function dataPath(url: string): string {
  return /^(data\/|\/|https?:|blob:)/.test(url) ? url : `data/${url}`;
}
