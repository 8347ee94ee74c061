// The help on keys, and the question for the service's key.
import { useEffect, useRef, useState } from "preact/hooks";
import { setKey } from "../data/client";
import { HELP, keysOn, switchKeys } from "./keys";

function useDialog(open: boolean) {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (open && !ref.current?.open) ref.current?.showModal();
    if (!open && ref.current?.open) ref.current.close();
  }, [open]);
  return ref;
}

export function HelpDialog(properties: { open: boolean; onClose: () => void }) {
  const ref = useDialog(properties.open);
  const [on, setOn] = useState(keysOn());
  return (
    <dialog ref={ref} onClose={properties.onClose} aria-labelledby="help-title" class="help">
      <h2 id="help-title">Keys</h2>
      <div class="help-groups">
        {HELP.map(([title, keys]) => (
          <section key={title}>
            <h3>{title}</h3>
            <dl>
              {keys.map(([key, what]) => (
                <div key={key}>
                  <dt>
                    {key.split(/\s+/).map((one) => (
                      <kbd key={one}>{one}</kbd>
                    ))}
                  </dt>
                  <dd>{what}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
      </div>
      <footer>
        <label>
          <input
            type="checkbox"
            checked={on}
            onChange={(event) => {
              switchKeys(event.currentTarget.checked);
              setOn(event.currentTarget.checked);
            }}
          />{" "}
          Keys of one letter work
        </label>
        <button type="button" onClick={properties.onClose}>
          Close
        </button>
      </footer>
    </dialog>
  );
}

export function KeyDialog(properties: { open: boolean; refused: boolean; onKey: () => void }) {
  const ref = useDialog(properties.open);
  return (
    <dialog ref={ref} aria-labelledby="key-title" class="key" onCancel={(event) => event.preventDefault()}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          setKey(String(new FormData(event.currentTarget).get("key") ?? ""));
          properties.onKey();
        }}
      >
        <h2 id="key-title">This service needs a key</h2>
        <p>{properties.refused ? "The key was refused. Try another." : "Runs and trajectories are shown to holders of a key. It is kept in this tab only."}</p>
        <label for="key-field">Key</label>
        <input id="key-field" name="key" type="password" autocomplete="off" required />
        <footer>
          <button type="submit" class="primary">
            Open
          </button>
        </footer>
      </form>
    </dialog>
  );
}
